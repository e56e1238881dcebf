"""Converts requests of OpenAI's API to requests of the engine, and its texts to answers, whole or in pieces."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError, PromptTooLongError, SheepOpError, UsageError
from sheepop.core.facts import counted
from sheepop.generate import GenerationConfig
from sheepop.generate.config import with_defaults
from sheepop.generate.request import Request
from sheepop.generate.scheduler import QueueFullError
from sheepop.generate.updates import Update
from sheepop.serve.chat_request import ChatRequest, ToolChoice
from sheepop.serve.protocol import ApiError, CompletionRequest, SamplingRequest
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import DeadlineError, EngineDeadError, ShutdownError

DONE = "data: [DONE]\n\n"
_DEFAULT_TOKENS = 16  # of text completions in OpenAI's API
# The settings that have the same name in the API and in a GenerationConfig.
_SAME_SETTINGS = set(SamplingRequest.model_fields) & set(GenerationConfig.model_fields) - {"stop", "logit_bias"}


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
            **requested.grammar(),
            **more,
        }
        return validate(GenerationConfig, given)
    except (ConfigError, UsageError) as error:
        raise ApiError(400, str(error)) from None


def chat_config(requested: ChatRequest, room: int, defaults: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a chat; without a limit, a text may fill the `room` in the context."""
    more: dict[str, Any] = {"max_new_tokens": requested.max_completion_tokens or requested.max_tokens or room}
    if requested.logprobs:
        more["top_logprobs"] = requested.top_logprobs or 0
    if (calls := calls_schema(requested)) is not None:
        if requested.grammar():
            raise ApiError(400, "tool_choice: cannot be combined with structured output.", param="tool_choice")
        more["json_schema"] = calls
    return sampling_config(requested, defaults, **more)


def completion_config(requested: CompletionRequest, defaults: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a text completion."""
    return sampling_config(
        requested,
        defaults,
        max_new_tokens=_DEFAULT_TOKENS if requested.max_tokens is None else max(1, requested.max_tokens),
        best_of=requested.best_of,
        top_logprobs=requested.logprobs,
    )


def calls_schema(requested: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of a tool call, if the chat must call a tool; else None."""
    if not requested.must_call:
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


@dataclass
class Answer:
    """An answer in progress: its engine requests, and its id and creation time in the API.

    Unless it `writes`, it is the prompts alone.
    """

    kind: str
    model: ServedModel
    requests: list[Request]
    writes: bool = True
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    num_written: int = field(default=0, init=False)
    num_reasoning: int = field(default=0, init=False)

    def head(self, suffix: str = "") -> dict[str, Any]:
        """The fields that every object of the answer begins with."""
        name = f"{'chatcmpl' if self.kind == 'chat.completion' else 'cmpl'}-{self.id}"
        about = {"created": self.created, "model": self.model.name, "system_fingerprint": self.model.fingerprint}
        return {"id": name, "object": self.kind + suffix, **about}

    def usage(self) -> dict[str, Any]:
        """The usage object of OpenAI's API: the tokens of the updates so far, and those of prompts from the cache.

        Of a chat it also has the tokens of reasoning, which `ChatPieces` counts.
        """
        read, written = sum(request.prompt.num_tokens for request in self.requests), self.num_written
        found: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        cached = sum(request.num_cached for request in self.requests)
        found["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.kind == "chat.completion":
            found["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return found

    def whole(self) -> list[Update]:
        """The chosen texts, each as one update, after all have ended."""
        if not self.writes:
            numbers = [(each, index) for each in self.requests for index in range(each.config.num_completions)]
            return [Update(request, index, finish_reason="length") for request, index in numbers]
        return [Update.of(candidate, candidate.text) for request in self.requests for candidate in request.chosen()]

    async def write(self, seconds: float) -> AsyncGenerator[list[Update], None]:
        """Yields an empty list when the engine accepts it, then the updates of each step; raises `ApiError`.

        The answer ends with an error after `seconds`.
        """
        if not self.writes:
            yield []
            yield self.whole()
            return
        try:
            async with aclosing(self.model.worker.write(self.requests, seconds=seconds)) as written:
                async for updates in written:
                    self.num_written += sum(len(update.token_ids) for update in updates)
                    yield updates
        except SheepOpError as error:
            raise api_error(error) from None


def api_error(error: SheepOpError) -> ApiError:
    """Converts an error of the engine to an error of the API."""
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), kind="server_error", code="overloaded", retry_after=1)
    if isinstance(error, ShutdownError):
        return ApiError(503, str(error), kind="server_error", code="draining", retry_after=1)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), kind="server_error", code="engine_dead")
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), kind="server_error", code="deadline_exceeded")
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    return ApiError(500, str(error), kind="server_error", code="engine_error")


def in_words_of_clients(error: PromptTooLongError) -> str:
    """The error for a prompt that does not fit, with the words by which clients of OpenAI's API recognise it."""
    return f"This model's maximum context length is exceeded. {str(error).partition(', or set')[0].rstrip('.')}."


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
