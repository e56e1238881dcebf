"""OpenAI's Responses API as a translation to the request of a chat, with its conversations kept for a while."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field, field_validator

from sheepop.serve.answering import Answering, Chunks, one_by_one
from sheepop.serve.chat_request import ChatRequest, Content, Function, NamedFunction, added, text_of
from sheepop.serve.protocol import ApiError, JsonSchema, ModelName, RequestModel, fitted

_MOST_KEPT, _LARGEST_KEPT, _KEPT_SECONDS = 1000, 64 * 2**20, 3600.0
Messages = list[dict[str, Any]]


class Item(RequestModel):
    """An item of the input: a message, or a call, its result, or reasoning from an earlier answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None

    def to_chat(self) -> dict[str, Any]:
        """The message of the chat; that of a call or reasoning is joined with its neighbours."""
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}
        if self.type == "reasoning":
            return {"role": "assistant", "reasoning_content": text_of(self.content)}
        return {"role": self.role, "content": text_of(self.content)}


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(RequestModel):
    """Options of the text; its verbosity has no effect."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: str | None = None


class Reasoning(RequestModel):
    """Options of reasoning: the effort is a variable of the chat template."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(RequestModel):
    """``POST /v1/responses``."""

    model: ModelName
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream_options: dict[str, Any] | None = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, given: list[str] | None) -> list[str] | None:
        if given and set(given) - {"reasoning.encrypted_content"}:
            raise ValueError("nothing more can be included than reasoning.encrypted_content")
        return given

    def to_chat(self, earlier: Messages) -> ChatRequest:
        """The request of the chat that goes on after `earlier` messages; raises `ApiError`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        answer, choice = self.text.format, self.tool_choice
        schema = {key: value for key, value in answer.model_dump(by_alias=True).items() if key != "type"}
        wanted = (
            {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else choice
        )
        values = {
            **self.model_dump(include={"model", "temperature", "top_p", "stream", "parallel_tool_calls"}),
            **self.model_dump(include={"store"}, exclude_unset=True),
            "messages": [*system, *earlier, *self.messages()],
            "max_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": _given(tool)} for tool in self.tools or ()] or None,
            "tool_choice": wanted,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": {
                "type": answer.type,
                **({"json_schema": schema} if answer.type == "json_schema" else {}),
            },
        }
        return fitted(ChatRequest, values)

    def messages(self) -> Messages:
        """The input as messages of a chat; what the assistant thinks, says and calls in a row is one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: Messages = []
        for item in self.input:
            message, last = item.to_chat(), found[-1] if found else {}
            if message["role"] == last.get("role") == "assistant" and not ("content" in message and "content" in last):
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                found[-1] = {**last, **message, **({"tool_calls": calls} if calls else {})}
            else:
                found.append(message)
        return found


class ResponsesStyle:
    """Answers as responses with items; `keep` takes the message of each answer that is complete."""

    media_type = "text/event-stream"

    def __init__(self, requested: ResponsesRequest, keep: Callable[[str, dict[str, Any]], None]) -> None:
        self._requested, self._keep = requested, keep

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """A response."""
        (choice,) = completion["choices"]
        name, message, output = _id(completion), choice["message"], list[dict[str, Any]]()
        for kind, text, call in added(message):
            output.append(_item(kind, f"{name}_{len(output)}", text, call))
        found = self._response(completion, output, choice["finish_reason"])
        self._keep(name, message)
        return found

    async def events(self, chunks: Chunks, num_prompt_tokens: int) -> AsyncIterator[str]:
        """The events of a response, its items and their parts."""
        number = 0

        def event(kind: str, **values: Any) -> str:
            nonlocal number
            number += 1
            about = {"type": f"response.{kind}", "sequence_number": number - 1, **values}
            return f"event: response.{kind}\ndata: {json.dumps(about)}\n\n"

        output: list[dict[str, Any]] = []
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        first: dict[str, Any] = {}
        opened, reason = "", None
        try:
            async for chunk in one_by_one(chunks):
                if not first:
                    first = chunk
                    started = self._response(first, [], None)
                    yield event("created", response=started)
                    yield event("in_progress", response=started)
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    for kind, text, call in added(choice["delta"]):
                        if kind != opened or call is not None:
                            if opened:
                                for each in _closing(output):
                                    yield event(each.pop("kind"), **each)
                            opened = kind
                            output.append(_item(kind, f"{_id(first)}_{len(output)}", "", call))
                            for each in _opening(output):
                                yield event(each.pop("kind"), **each)
                        _add(output[-1], text)
                        about = {"item_id": output[-1]["id"], "output_index": len(output) - 1, "delta": text}
                        yield event(f"{_DELTAS[output[-1]['type']]}.delta", **about, **_part_of(output[-1]["type"]))
                        if call is not None:
                            message.setdefault("tool_calls", []).append(call)
                        else:
                            field = "content" if kind == "text" else "reasoning_content"
                            message[field] = message.get(field, "") + text
                if not chunk["choices"]:
                    if opened:
                        for each in _closing(output):
                            yield event(each.pop("kind"), **each)
                    found = self._response({**first, "usage": chunk["usage"]}, output, reason)
                    self._keep(_id(first), message)
                    yield event(found["status"], response=found)
        except ApiError as error:
            problem = error.body["error"]
            failed = {**self._response(first, output, None), "status": "failed"} if first else {}
            told = {"code": problem["code"] or "server_error", "message": problem["message"]}
            yield event("failed", response={**failed, "error": told})

    def _response(self, completion: dict[str, Any], output: Messages, reason: str | None) -> dict[str, Any]:
        asked, usage = self._requested, completion.get("usage")
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        settings = asked.model_dump(
            include={
                "instructions", "max_output_tokens", "metadata", "previous_response_id", "parallel_tool_calls", "store",
                "temperature", "top_p", "tool_choice", "truncation", "user",
            }
        )  # fmt: skip
        return {
            **settings,
            "id": _id(completion),
            "object": "response",
            "created_at": completion["created"],
            "model": completion["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [dict(item) for item in output],
            "tools": [{"type": "function", "strict": None, **_given(tool)} for tool in asked.tools or ()],
            "text": {"format": asked.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}},
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }


class Responses:
    """The endpoint, and the conversations of the last hour, each known to the client that had it only."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._kept: OrderedDict[tuple[str, str], tuple[float, int, Messages]] = OrderedDict()
        self._size = 0

    async def respond(self, requested: ResponsesRequest, request: Request) -> Response:
        """Answers the input, after the earlier response that it names."""
        tenant = self._answering.doorkeeper.client(request.headers).settings.name
        earlier = self._earlier(tenant, requested.previous_response_id)
        chat = await self._answering.bodies.do(requested.to_chat, earlier)
        said = [*earlier, *await self._answering.bodies.do(requested.messages)]

        def keep(name: str, message: dict[str, Any]) -> None:
            if requested.store:
                kept = {key: value for key, value in message.items() if value is not None and key != "refusal"}
                self._remember((tenant, name), [*said, kept])

        return await self._answering.chat(chat, request, ResponsesStyle(requested, keep))

    def _earlier(self, tenant: str, name: str | None) -> Messages:
        if name is None:
            return []
        made, _, messages = self._kept.get((tenant, name), (0.0, 0, []))
        if not messages or time.monotonic() - made > _KEPT_SECONDS:
            message = f"There is no response {name!r}, or it was kept for too long ago. Send the whole conversation."
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        return messages

    def _remember(self, key: tuple[str, str], messages: Messages) -> None:
        size = len(json.dumps(messages))
        self._kept[key] = (time.monotonic(), size, messages)
        self._size += size
        while len(self._kept) > _MOST_KEPT or self._size > _LARGEST_KEPT:
            _, (_, gone, _) = self._kept.popitem(last=False)
            self._size -= gone


_TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def _given(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_unset=True, exclude={"type"})


def _id(completion: dict[str, Any]) -> str:
    return str(completion["id"]).replace("chatcmpl-", "resp_")


def _item(kind: str, name: str, text: str, call: dict[str, Any] | None = None) -> dict[str, Any]:
    item: dict[str, Any] = {"id": name, "type": _TYPES[kind], "status": "completed" if text else "in_progress"}
    if call is not None:
        return {**item, "call_id": call["id"], "name": call["function"]["name"], "arguments": text}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    return {**item, "role": "assistant", "content": [_output_text(text)]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _add(item: dict[str, Any], text: str) -> None:
    if item["type"] == "function_call":
        item["arguments"] += text
    else:
        item["content"][0]["text"] += text


def _part_of(kind: str) -> dict[str, Any]:
    return {} if kind == "function_call" else {"content_index": 0, **({"logprobs": []} if kind == "message" else {})}


def _opening(output: Messages) -> list[dict[str, Any]]:
    """The events that begin the last item."""
    item, place = output[-1], len(output) - 1
    parts = {"item_id": item["id"], "output_index": place, "content_index": 0}
    empty = {**item, **({} if item["type"] == "function_call" else {"content": []})}
    found = [{"kind": "output_item.added", "output_index": place, "item": empty}]
    if item["type"] == "message":
        found.append({"kind": "content_part.added", **parts, "part": _output_text("")})
    return found


def _closing(output: Messages) -> list[dict[str, Any]]:
    """The events that end the last item."""
    item, place = output[-1], len(output) - 1
    item["status"], kind = "completed", item["type"]
    about: dict[str, Any] = {"item_id": item["id"], "output_index": place}
    end = {"kind": f"{_DELTAS[kind]}.done", **about, **_part_of(kind)}
    found: list[dict[str, Any]] = []
    if kind == "function_call":
        found.append({**end, "name": item["name"], "arguments": item["arguments"]})
    else:
        found.append({**end, "text": item["content"][0]["text"]})
    if kind == "message":
        found.append({"kind": "content_part.done", **about, "content_index": 0, "part": item["content"][0]})
    return [*found, {"kind": "output_item.done", "output_index": place, "item": dict(item)}]
