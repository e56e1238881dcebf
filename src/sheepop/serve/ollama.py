"""Ollama's API as a translation to the requests of chats, completions and embeddings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import BeforeValidator, Field

from sheepop.serve.answering import Answering, Chunks, one_by_one
from sheepop.serve.chat_request import ChatRequest, NoneYet, Tool
from sheepop.serve.config import duration
from sheepop.serve.embeddings import Embeddings
from sheepop.serve.protocol import (
    ApiError,
    CompletionRequest,
    ModelName,
    Prompts,
    RequestModel,
    error_body,
    fitted,
)
from sheepop.serve.served_model import ServedModel
from sheepop.serve.stock import Card

_CENTURY = 100 * 365 * 86400
# Options with their names in the API of OpenAI; those of None change no answer.
_OPTIONS = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "num_keep", "numa")),
}  # fmt: skip


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(duration)]


class Function(RequestModel):
    """A function that the model called."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class Call(RequestModel):
    """A call of a tool in an earlier message."""

    function: Function
    id: str | None = None
    type: str | None = None


class OllamaMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: NoneYet = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def to_chat(self) -> dict[str, Any]:
        """The message of the chat."""
        calls = [
            {
                "id": call.id or f"call_{number}",
                "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
            }
            for number, call in enumerate(self.tool_calls or ())
        ]
        return {
            "role": self.role,
            "content": self.content if self.content or not calls else None,
            "reasoning_content": self.thinking,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }


class _Asked(RequestModel):
    model: ModelName
    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: KeepAlive | None = None

    def settings(self) -> dict[str, Any]:
        """The settings in the words of OpenAI's API; raises `ApiError` for an unknown option."""
        found: dict[str, Any] = {"model": plain_name(self.model), "stream": self.stream}
        for name, value in (self.options or {}).items():
            if name not in _OPTIONS:
                raise ApiError(400, f"options.{name} is not supported.", param=f"options.{name}")
            key = _OPTIONS[name]
            # A negative number of tokens means as many as fit, and a negative seed one that is drawn.
            if key is not None and not (name in ("num_predict", "seed") and isinstance(value, int) and value < 0):
                found[key] = value
        if self.format:
            schema = {"type": "object"} if self.format == "json" else self.format
            found["structured_outputs"] = {"json": schema}
        return found

    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"chat_template_kwargs": {"enable_thinking": bool(self.think), **effort}}


class OllamaChatRequest(_Asked):
    """``POST /api/chat``."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(default_factory=list)
    tools: list[Tool] | None = None

    def to_chat(self) -> ChatRequest:
        """The request of the chat; raises `ApiError`."""
        messages = [message.to_chat() for message in self.messages]
        tools = [tool.given for tool in self.tools or ()] or None
        return fitted(ChatRequest, {**self.settings(), **self.variables(), "messages": messages, "tools": tools})


class GenerateRequest(_Asked):
    """``POST /api/generate``."""

    prompt: str = ""
    system: str | None = None
    images: NoneYet = None
    raw: bool = False

    def to_chat(self) -> ChatRequest:
        """The request of a chat of one message."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": self.prompt}]
        return fitted(ChatRequest, {**self.settings(), **self.variables(), "messages": messages})

    def to_completion(self, room: int) -> CompletionRequest:
        """The request of a completion of up to `room` tokens, without the chat template."""
        if self.system is not None:
            raise ApiError(400, "system: only with a chat template, and without raw.", param="system")
        return fitted(CompletionRequest, {"max_tokens": room, **self.settings(), "prompt": self.prompt})


class ShowRequest(RequestModel):
    """``POST /api/show``."""

    model: ModelName
    verbose: bool = False


class OllamaEmbedRequest(RequestModel):
    """``POST /api/embed``."""

    model: ModelName
    input: Prompts
    truncate: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaStyle:
    """Answers as lines of JSON, with the text in `message` of a chat, or else in `response`."""

    media_type = "application/x-ndjson"

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat, self._started = is_chat, time.monotonic_ns()

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """One object with everything."""
        (choice,) = completion["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        return {**self._piece(completion, message), **self._end(choice["finish_reason"], completion["usage"])}

    async def events(self, chunks: Chunks, num_prompt_tokens: int) -> AsyncIterator[str]:
        """A line for each piece."""
        reason, last = "stop", dict[str, Any]()
        try:
            async for chunk in one_by_one(chunks):
                for choice in chunk["choices"]:
                    reason, last = choice["finish_reason"] or reason, chunk
                    delta = choice.get("delta") or {"content": choice.get("text", "")}
                    if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
                        yield _line({**self._piece(chunk, delta), "done": False})
                if not chunk["choices"]:
                    yield _line({**self._piece(last or chunk, {}), **self._end(reason, chunk["usage"])})
        except ApiError as error:
            yield _line(error_body(error, "/api/"))

    def _piece(self, completion: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        thinking = {"thinking": message["reasoning_content"]} if message.get("reasoning_content") else {}
        text, about = message.get("content") or "", {"model": completion["model"], "created_at": _now()}
        if not self._is_chat:
            return {**about, "response": text, **thinking}
        calls = [
            {"function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        said = {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}
        return {**about, "message": said}

    def _end(self, reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._started,
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }


class Ollama:
    """The endpoints of Ollama's API."""

    def __init__(self, answering: Answering, embeddings: Embeddings) -> None:
        self._answering, self._embeddings, self._registry = answering, embeddings, answering.registry

    async def chat(self, requested: OllamaChatRequest, request: Request) -> Response:
        """Answers a conversation; one without messages loads the model, or unloads it."""
        if not requested.messages:
            return await self._load(requested, request, {"message": {"role": "assistant", "content": ""}})
        chat = await self._answering.bodies.do(requested.to_chat)
        async with self._using(requested, request, requested.keep_alive):
            return await self._answering.chat(chat, request, OllamaStyle(is_chat=True))

    async def generate(self, requested: GenerateRequest, request: Request) -> Response:
        """Answers a text, or with `raw` or without a chat template, continues it; without a text loads the model."""
        if not requested.prompt:
            return await self._load(requested, request, {"response": ""})
        style = OllamaStyle(is_chat=False)
        async with self._using(requested, request, requested.keep_alive) as model:
            if requested.raw or model.template is None:
                encode = model.encoded
                prompt = await self._answering.while_wanted(
                    request, model.prepare(encode, requested.prompt, with_prefix=True, parse_special=False), "prompt"
                )
                completion = requested.to_completion(model.room(len(prompt), 1))
                return await self._answering.complete(completion, request, style)
            chat = await self._answering.bodies.do(requested.to_chat)
            return await self._answering.chat(chat, request, style)

    async def tags(self, request: Request) -> dict[str, Any]:
        """The models of this server, loaded or not."""
        self._answering.doorkeeper.client(request.headers)
        return {"models": [_described(card) for card in self._registry.cards()]}

    async def running(self, request: Request) -> dict[str, Any]:
        """The loaded models, and when each is unloaded if nobody uses it."""
        self._answering.doorkeeper.client(request.headers)
        cards = [card for card in self._registry.cards() if card.state == "loaded" and card.name == card.root]
        return {
            "models": [
                {**_described(card), "size_vram": card.about.num_bytes, "expires_at": _in_seconds(card.seconds_left)}
                for card in cards
            ]
        }

    async def _load(self, requested: _Asked, request: Request, message: dict[str, Any]) -> Response:
        """Loads the model, or with a `keep_alive` of 0 lets it go."""
        unloads = requested.keep_alive == 0
        if unloads:
            self._registry.keep(plain_name(requested.model), 0)
        else:
            async with self._using(requested, request, requested.keep_alive):
                pass
        about = {"model": requested.model, "created_at": _now(), **message, "done": True}
        return await self._answering.json({**about, "done_reason": "unload" if unloads else "load"})

    @asynccontextmanager
    async def _using(
        self, requested: _Asked | OllamaEmbedRequest | ShowRequest, request: Request, keep_alive: float | None = None
    ) -> AsyncIterator[ServedModel]:
        entering = self._registry.entered(plain_name(requested.model), keep_alive)
        model = await self._answering.while_wanted(request, entering, "model")
        try:
            yield model
        finally:
            self._registry.leave(model)

    async def show(self, requested: ShowRequest, request: Request) -> dict[str, Any]:
        """One model."""
        self._answering.doorkeeper.client(request.headers)
        async with self._using(requested, request) as model:
            can = ["completion", *(["tools"] if model.template is not None else [])]
            thinks = any(section.kind == "reasoning" for section in model.sections)
            longest = model.generator.max_seq_len
            return {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in model.generator.defaults.items()),
                "template": "" if model.template is None else model.template.source,
                "details": _described(self._registry.card(model.name))["details"],
                "model_info": {"general.architecture": "sheepop", "sheepop.context_length": longest},
                "capabilities": [*can, *(["thinking"] if thinks else []), "embedding"],
            }

    async def embed(self, requested: OllamaEmbedRequest, request: Request) -> Response:
        """A vector for each text."""
        started = time.monotonic_ns()
        name = plain_name(requested.model)
        async with self._using(requested, request, requested.keep_alive):
            vectors, count = await self._embeddings.vectors(request, name, requested.input, "input")
        about = {"model": name, "total_duration": time.monotonic_ns() - started, "prompt_eval_count": count}
        return await self._answering.json({**about, "embeddings": vectors})


def plain_name(model: str) -> str:
    """The name of a model without the tag that Ollama's clients add."""
    return model.removesuffix(":latest")


def _described(card: Card) -> dict[str, Any]:
    size = f"{card.about.num_parameters:,}"
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
        "size": card.about.num_bytes,
        "digest": "",
        "details": {"family": "sheepop", "parameter_size": size, "quantization_level": ""},
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _in_seconds(seconds: float | None) -> str:
    """The time after so many seconds, at most a century from now, which stands for ever."""
    return (datetime.now(UTC) + timedelta(seconds=min(seconds or 0, _CENTURY))).isoformat()


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
