"""Converts requests of OpenAI's API to requests of the engine, and its texts to answers, whole or in pieces."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError, SheepOpError, UsageError
from sheepop.core.facts import counted
from sheepop.generate import GenerationConfig
from sheepop.generate.config import with_defaults
from sheepop.generate.engine import Update
from sheepop.generate.request import Candidate, Request
from sheepop.generate.scheduler import QueueFullError
from sheepop.serve.protocol import ApiError, ChatRequest, CompletionRequest, SamplingRequest, ToolChoice
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import DeadlineError, ShutdownError

DONE = "data: [DONE]\n\n"
_MARK = "<tool_call>"
_DEFAULT_TOKENS = 16  # of text completions in OpenAI's API
_MARKED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# The settings that have the same name in the API and in a GenerationConfig.
_SAME_SETTINGS = set(SamplingRequest.model_fields) & set(GenerationConfig.model_fields) - {"stop", "logit_bias"}
_FINISH = {"stop": "stop", "length": "length", "abort": "stop"}


def sampling_config(
    requested: CompletionRequest | ChatRequest, defaults: Mapping[str, Any], **more: Any
) -> GenerationConfig:
    """Returns the generation settings of a request; raises `ApiError` for values that the engine refuses.

    What the request leaves out has the model's `defaults`, else the API's.
    """
    try:
        bias = {int(token): value for token, value in (requested.logit_bias or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: its keys must be token ids.", param="logit_bias") from None
    if requested.min_tokens > more["max_new_tokens"]:
        most = counted(more["max_new_tokens"], "token")
        message = f"min_tokens: {requested.min_tokens} is more than the {most} that may be written."
        raise ApiError(400, message, param="min_tokens")
    asked = {**requested.model_dump(include=_SAME_SETTINGS, exclude_unset=True), "num_completions": requested.n}
    try:
        given = {
            **requested.model_dump(include=_SAME_SETTINGS),
            **with_defaults(asked, defaults),
            "logit_bias": bias,
            "min_new_tokens": requested.min_tokens,
            "stop": [requested.stop] if isinstance(requested.stop, str) else requested.stop or (),
            **more,
        }
        return validate(GenerationConfig, given)
    except (ConfigError, UsageError) as error:
        raise ApiError(400, str(error)) from None


def chat_config(requested: ChatRequest, room: int, defaults: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a chat; without a limit, a text may fill the `room` in the context."""
    more: dict[str, Any] = {"max_new_tokens": requested.max_completion_tokens or requested.max_tokens or max(1, room)}
    if requested.logprobs:
        more["top_logprobs"] = requested.top_logprobs or 0
    if requested.response_format is not None and requested.response_format.type != "text":
        schema = requested.response_format.json_schema
        more["json_schema"] = {"type": "object"} if schema is None else schema.schema_
    if (calls := _calls_schema(requested)) is not None:
        if "json_schema" in more:
            raise ApiError(400, "tool_choice: cannot be combined with response_format.", param="tool_choice")
        more["json_schema"] = calls
    return sampling_config(requested, defaults, **more)


def completion_config(requested: CompletionRequest, defaults: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a text completion."""
    return sampling_config(
        requested,
        defaults,
        max_new_tokens=requested.max_tokens or _DEFAULT_TOKENS,
        best_of=requested.best_of,
        top_logprobs=requested.logprobs,
    )


def _calls_schema(requested: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of a tool call, if the chat must call a tool; else None."""
    if not isinstance(requested.tool_choice, ToolChoice) and requested.tool_choice != "required":
        return None
    wanted = requested.tool_choice.function.name if isinstance(requested.tool_choice, ToolChoice) else None
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in requested.tools or ()
        if wanted is None or tool.function.name == wanted
    ]
    return {"anyOf": options}


def tool_calls(text: str, requested: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """Splits an answer into its text and its tool calls: the one required call, or those in ``<tool_call>`` tags."""
    if not requested.tools or requested.tool_choice == "none":
        return text, []
    if _calls_schema(requested) is not None:
        try:
            return "", [_call(text, requested)]
        except ValueError:  # the length limit cut it
            return text, []
    said, end, calls = "", 0, []
    for found in _MARKED.finditer(text):
        try:
            calls.append(_call(found[1], requested))
        except ValueError:
            continue  # it stays in the text
        said, end = said + text[end : found.start()], found.end()
    return (said + text[end:]).strip() if calls else text, calls


def _call(text: str, requested: ChatRequest) -> dict[str, Any]:
    """Returns the tool call object of OpenAI's API; raises `ValueError` if `text` calls no tool of the request."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("the call is nested too deeply") from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("a call is an object with a name")
    if found["name"] not in {tool.function.name for tool in requested.tools or ()}:
        raise ValueError("the request has no tool of this name")
    arguments = found.get("arguments", {})
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": found["name"], "arguments": json.dumps(arguments)},
    }


@dataclass
class Answer:
    """An answer in progress: its engine requests, and its id and creation time in the API."""

    kind: str
    model: ServedModel
    requests: list[Request]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, suffix: str = "") -> dict[str, Any]:
        """The fields that every object of the answer begins with."""
        name = f"{'chatcmpl' if self.kind == 'chat.completion' else 'cmpl'}-{self.id}"
        return {"id": name, "object": self.kind + suffix, "created": self.created, "model": self.model.name}

    def usage(self) -> dict[str, int]:
        """The usage object of OpenAI's API: the tokens so far."""
        read = sum(request.prompt.num_tokens for request in self.requests)
        written = sum(len(candidate.token_ids) for request in self.requests for candidate in request.candidates)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def number(self, candidate: Candidate) -> int:
        """The index of a text among the answer's choices while it streams."""
        return candidate.index + candidate.request.index * candidate.request.num_candidates

    async def write(self, seconds: float) -> AsyncGenerator[list[Update], None]:
        """Yields an empty list when the engine accepts it, then the updates of each step; raises `ApiError`.

        The answer ends with an error after `seconds`.
        """
        try:
            async with aclosing(self.model.worker.write(self.requests, seconds=seconds)) as written:
                async for updates in written:
                    yield updates
        except SheepOpError as error:
            raise api_error(error) from None


def api_error(error: SheepOpError) -> ApiError:
    """Converts an error of the engine to an error of the API."""
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), kind="server_error", code="overloaded", retry_after=1)
    if isinstance(error, ShutdownError):
        return ApiError(503, str(error), kind="server_error", code="draining", retry_after=1)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), kind="server_error", code="deadline_exceeded")
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    return ApiError(500, str(error), kind="server_error", code="engine_error")


def chat_logprobs(candidate: Candidate, model: ServedModel, first: int = 0) -> dict[str, Any]:
    """The log-probabilities of a chat's tokens from index `first` on, as in OpenAI's API."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = model.tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = []
    for number in range(first, len(candidate.token_ids)):
        likeliest = candidate.likeliest[number]
        top = [entry(*pair) for pair in zip(likeliest.token_ids, likeliest.logprobs, strict=True)]
        content.append({**entry(candidate.token_ids[number], candidate.logprobs[number]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(candidate: Candidate, model: ServedModel, offset: int, first: int = 0) -> dict[str, Any]:
    """The log-probabilities of a text completion's tokens from index `first` on, as in OpenAI's API.

    `offset` is the character index of the first token.
    """

    def piece(token_id: int) -> str:
        return model.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    tokens = [piece(token_id) for token_id in candidate.token_ids]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens[first:],
        "token_logprobs": candidate.logprobs[first:],
        "top_logprobs": [
            dict(zip(map(piece, found.token_ids), found.logprobs, strict=True)) for found in candidate.likeliest[first:]
        ],
        "text_offset": offsets[first:-1],
    }


def finish_reason(candidate: Candidate) -> str | None:
    """Why a text ended; None before its end."""
    return None if candidate.finish_reason is None else _FINISH[candidate.finish_reason]


def as_prompts(prompt: str | Sequence[Any], param: str, most: int) -> list[str | list[int]]:
    """Returns the prompts in a field, each a text or token ids; raises `ApiError` for none, or more than `most`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, f"{param}: must not be an empty list.", param=param)
    prompts: list[Any] = [list(prompt)] if isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > most:
        raise ApiError(400, f"{param}: at most {most} texts at a time, got {len(prompts)}.", param=param)
    return prompts


def event(value: Mapping[str, Any]) -> str:
    """Formats a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


class TextPieces:
    """The choices of ``/v1/completions``."""

    def __init__(self, answer: Answer, requested: CompletionRequest) -> None:
        self._answer, self._requested = answer, requested
        self._sent_tokens: dict[int, int] = {}

    def whole(self, candidate: Candidate, number: int) -> dict[str, Any]:
        """A finished choice."""
        prompt = candidate.request.prompt.text if self._requested.echo else ""
        return {
            "index": number,
            "text": prompt + candidate.text,
            "logprobs": self._logprobs(candidate, 0),
            "finish_reason": finish_reason(candidate),
        }

    def piece(self, candidate: Candidate, number: int, text: str) -> list[dict[str, Any]]:
        """The new piece of a choice after a step, if there is one."""
        first = self._sent_tokens.get(number)
        if first is None and self._requested.echo:
            text = candidate.request.prompt.text + text
        first, self._sent_tokens[number] = first or 0, len(candidate.token_ids)
        if not text and candidate.finish_reason is None:
            self._sent_tokens[number] = first
            return []
        logprobs = self._logprobs(candidate, first)
        return [{"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(candidate)}]

    def _logprobs(self, candidate: Candidate, first: int) -> dict[str, Any] | None:
        if self._requested.logprobs is None:
            return None
        offset = len(candidate.request.prompt.text) if self._requested.echo else 0
        return text_logprobs(candidate, self._answer.model, offset, first)


class ChatPieces:
    """The choices of ``/v1/chat/completions``."""

    def __init__(self, answer: Answer, requested: ChatRequest) -> None:
        self._answer, self._requested = answer, requested
        self._sent_tokens: dict[int, int] = {}
        self._sent_characters: dict[int, int] = {}
        self._may_call = bool(requested.tools) and requested.tool_choice != "none"

    def whole(self, candidate: Candidate, number: int) -> dict[str, Any]:
        """A finished choice."""
        said, calls = tool_calls(candidate.text, self._requested)
        message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(candidate, self._answer.model) if self._requested.logprobs else None
        reason = "tool_calls" if calls else finish_reason(candidate)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def piece(self, candidate: Candidate, number: int, text: str) -> list[dict[str, Any]]:
        """The new pieces of a choice after a step: the role, once, then text, tool calls, and the finish reason."""
        found = []
        if number not in self._sent_tokens:
            self._sent_tokens[number] = self._sent_characters[number] = 0
            found.append(self._choice(number, {"role": "assistant", "content": "", "refusal": None}))
        over = candidate.finish_reason is not None
        calls: list[dict[str, Any]] = []
        if self._may_call:
            said, calls = tool_calls(candidate.text, self._requested) if over else (self._certain(candidate.text), [])
            text = said[self._sent_characters[number] :]
            self._sent_characters[number] += len(text)
        if text:
            first, self._sent_tokens[number] = self._sent_tokens[number], len(candidate.token_ids)
            logprobs = chat_logprobs(candidate, self._answer.model, first) if self._requested.logprobs else None
            found.append(self._choice(number, {"content": text}, logprobs=logprobs))
        if calls:
            numbered = [{"index": index, **call} for index, call in enumerate(calls)]
            found.append(self._choice(number, {"tool_calls": numbered}))
        if over:
            found.append(self._choice(number, {}, reason="tool_calls" if calls else finish_reason(candidate)))
        return found

    def _certain(self, text: str) -> str:
        """The prefix of a text that is not part of a tool call, whatever follows."""
        if self._requested.tool_choice not in (None, "auto"):
            return ""
        before, mark, _ = text.partition(_MARK)
        if mark:
            return before.rstrip()
        withheld = next((size for size in range(len(_MARK) - 1, 0, -1) if text.endswith(_MARK[:size])), 0)
        return text[: len(text) - withheld].rstrip()

    def _choice(
        self, number: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
