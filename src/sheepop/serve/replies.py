"""The shapes of answers, as the description of the API gives them; answers themselves are written as they come."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """The base of all."""

    model_config = ConfigDict(extra="forbid")


class Status(Shape):
    """The state of the server."""

    status: Literal["ok", "ready"]


class ModelCard(Shape):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Shape):
    """The tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Shape):
    """The text of tokens."""

    prompt: str


class EmbeddingUsage(Shape):
    """Tokens of texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    """The vector of a text; little-endian 32-bit numbers in base64, where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape):
    """Vectors of texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Usage(Shape):
    """Tokens of prompts and of texts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(Shape):
    """The log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Shape):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class Completion(Shape):
    """Texts that continue prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TopLogprob(Shape):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was written, and those that were likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """The log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    """A function that is called; its arguments are JSON."""

    name: str
    arguments: str


class Call(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Shape):
    """What the model answers."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | None = None


class ChatChoice(Shape):
    """One of the answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(Shape):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Problem(Shape):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Shape):
    """An error."""

    error: Problem


_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Refusal, "description": "The request cannot be answered as it is."},
    "5XX": {"model": Refusal, "description": "The server cannot answer now."},
}


def described(shape: type[Shape], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What an endpoint may answer, for its description."""
    answer: dict[str, Any] = {"model": shape, "description": shape.__doc__}
    if streams:
        data = {"type": "string", "description": "A piece of the answer as JSON; of the last event `[DONE]`."}
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        answer["content"] = {"text/event-stream": {"schema": event}}
    return {200: answer, **_REFUSALS}
