"""Converts requests of OpenAI's API to requests of the engine, and its texts to answers."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError, SheepOpError, UsageError
from sheepop.core.facts import counted
from sheepop.generate import GenerationConfig
from sheepop.generate.engine import Update
from sheepop.generate.request import Candidate, Request
from sheepop.generate.scheduler import QueueFullError
from sheepop.serve.protocol import ApiError, ChatRequest, CompletionRequest, ToolChoice
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import DeadlineError, ShutdownError

_DEFAULT_TOKENS = 16  # of text completions in OpenAI's API
_MARKED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FINISH = {"stop": "stop", "length": "length", "abort": "stop"}


@dataclass
class Usage:
    """The number of tokens of prompts and of generated texts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        """The usage object of OpenAI's API."""
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


def sampling_config(requested: CompletionRequest | ChatRequest, **more: Any) -> GenerationConfig:
    """Returns the generation settings of a request; raises `ApiError` for values that the engine refuses."""
    try:
        bias = {int(token): value for token, value in (requested.logit_bias or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: its keys must be token ids.", param="logit_bias") from None
    if requested.min_tokens > more["max_new_tokens"]:
        most = counted(more["max_new_tokens"], "token")
        message = f"min_tokens: {requested.min_tokens} is more than the {most} that may be written."
        raise ApiError(400, message, param="min_tokens")
    given = {
        "temperature": requested.temperature,
        "top_p": requested.top_p,
        "top_k": requested.top_k,
        "min_p": requested.min_p,
        "typical_p": requested.typical_p,
        "repetition_penalty": requested.repetition_penalty,
        "presence_penalty": requested.presence_penalty,
        "frequency_penalty": requested.frequency_penalty,
        "logit_bias": bias,
        "num_completions": requested.n,
        "min_new_tokens": requested.min_tokens,
        "seed": requested.seed,
        "stop": [requested.stop] if isinstance(requested.stop, str) else requested.stop or (),
        **more,
    }
    try:
        return validate(GenerationConfig, given)
    except ConfigError as error:
        raise ApiError(400, str(error)) from None


def chat_config(requested: ChatRequest, room: int) -> GenerationConfig:
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
    return sampling_config(requested, **more)


def completion_config(requested: CompletionRequest) -> GenerationConfig:
    """Returns the generation settings of a text completion."""
    return sampling_config(
        requested,
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
        mark = "chatcmpl" if self.kind == "chat.completion" else "cmpl"
        return {
            "id": f"{mark}-{self.id}",
            "object": self.kind + suffix,
            "created": self.created,
            "model": self.model.name,
        }

    def usage(self) -> Usage:
        """The tokens so far."""
        written = [candidate for request in self.requests for candidate in request.candidates]
        return Usage(
            sum(request.prompt.num_tokens for request in self.requests),
            sum(len(candidate.token_ids) for candidate in written),
        )

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
