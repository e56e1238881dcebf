"""Anthropic's Messages API as a translation to the request of a chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field

from sheepop.serve.answering import Answering, Chunks, one_by_one
from sheepop.serve.chat_request import ChatRequest, Content, Part, added, text_of
from sheepop.serve.protocol import ApiError, ModelName, RequestModel, error_body, fitted

# By kind: the type of a block, its empty content, and the type and the key of what is added to it.
_BLOCKS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "reasoning": ("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "text": ("text", {"text": ""}, "text_delta", "text"),
    "call": ("tool_use", {"input": {}}, "input_json_delta", "partial_json"),
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ThinkingBlock(RequestModel):
    """Reasoning of the model, as it came in an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(RequestModel):
    """A call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


Block = Annotated[Part | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    def to_chat(self) -> list[dict[str, Any]]:
        """The messages of the chat: results of tools first, then the rest."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        found: list[dict[str, Any]] = []
        message: dict[str, Any] = {"role": self.role}
        texts = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)})
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            else:
                texts.append(block.text)
        if texts or not found:
            message["content"] = "".join(texts)
        return [*found, message] if len(message) > 1 else found


class ToolDescription(RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Choice(RequestModel):
    """Whether and what the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(RequestModel):
    """Whether the model reasons first; its budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(RequestModel):
    """A schema that the answer must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """How the answer is written: the effort is a variable of the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(RequestModel):
    """``POST /v1/messages``."""

    model: ModelName
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)]
    system: Content | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[ToolDescription] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None

    def to_chat(self) -> ChatRequest:
        """The request of the chat; raises `ApiError`."""
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        choice = self.tool_choice or Choice(type="auto")
        named = {"type": "function", "function": {"name": choice.name or ""}}
        values = {
            **self.model_dump(include={"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}),
            "messages": [*system, *(message for turn in self.messages for message in turn.to_chat())],
            "stop": self.stop_sequences or None,
            "tools": [_function(tool) for tool in self.tools or ()] or None,
            "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type) if self.tools else None,
            "reasoning_effort": self.output_config.effort,
            "guided_json": self.output_config.format and self.output_config.format.schema_,
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "chat_template_kwargs": None
            if self.thinking is None
            else {"enable_thinking": self.thinking.type != "disabled"},
        }
        return fitted(ChatRequest, values)


class MessagesStyle:
    """Answers as messages of blocks: thinking, text, and uses of tools."""

    media_type = "text/event-stream"

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """A message."""
        (choice,) = completion["choices"]
        blocks = [{**_block(kind, call), **_whole(kind, text)} for kind, text, call in added(choice["message"])]
        return {**_head(completion, completion["usage"]), "content": blocks, **_end(choice)}

    async def events(self, chunks: Chunks, num_prompt_tokens: int) -> AsyncIterator[str]:
        """The events of a message and its blocks."""
        number, kind = -1, ""
        choice: dict[str, Any] = {}
        try:
            async for chunk in one_by_one(chunks):
                if number < 0:
                    number = 0
                    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0}
                    yield _event("message_start", message={**_head(chunk, usage), "content": [], **_end({})})
                for choice in chunk["choices"]:
                    for new, text, call in added(choice["delta"]):
                        if new != kind or call is not None:
                            if kind:
                                yield _event("content_block_stop", index=number)
                                number += 1
                            kind = new
                            yield _event("content_block_start", index=number, content_block=_block(kind, call))
                        delta = {"type": _BLOCKS[kind][2], _BLOCKS[kind][3]: text}
                        yield _event("content_block_delta", index=number, delta=delta)
                if not chunk["choices"]:
                    if kind:
                        yield _event("content_block_stop", index=number)
                    yield _event("message_delta", delta=_end(choice), usage=_usage(chunk["usage"]))
            yield _event("message_stop")
        except ApiError as error:
            yield f"event: error\ndata: {json.dumps(error_body(error, '/v1/messages'))}\n\n"


class Messages:
    """The endpoints of Anthropic's API."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def messages(self, requested: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        chat = await self._answering.bodies.do(requested.to_chat)
        return await self._answering.chat(chat, request, MessagesStyle())


def _function(tool: ToolDescription) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _block(kind: str, call: dict[str, Any] | None) -> dict[str, Any]:
    """A block as it begins."""
    name, empty, _, _ = _BLOCKS[kind]
    about = {} if call is None else {"id": call["id"], "name": call["function"]["name"]}
    return {"type": name, **about, **empty}


def _whole(kind: str, text: str) -> dict[str, Any]:
    return {"input": json.loads(text)} if kind == "call" else {_BLOCKS[kind][3]: text}


def _head(completion: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    name = completion["id"].replace("chatcmpl-", "msg_")
    about = {"id": name, "type": "message", "role": "assistant", "model": completion["model"]}
    return {**about, "usage": _usage(usage)}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _end(choice: dict[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    reason = "stop_sequence" if stop is not None else _REASONS.get(choice.get("finish_reason") or "")
    return {"stop_reason": reason, "stop_sequence": stop}


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"
