"""The shapes of answers for the OpenAPI description of the API; the server does not validate its answers by them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """The base class of all shapes."""

    model_config = ConfigDict(extra="forbid")


class Status(Shape):
    """The state of the server."""

    status: Literal["ok", "ready"]


class ModelCard(Shape):
    """A model, with its own settings for what a request leaves out."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None
    state: Literal["loaded", "loading", "unloaded"]
    size: int
    default_sampling_params: dict[str, Any]


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
    """The number of tokens of texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    """The vector of a text: numbers, or on request little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape):
    """The vectors of texts, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class PromptTokensDetails(Shape):
    """How many tokens of prompts were in the cache."""

    cached_tokens: int


class Version(Shape):
    """The version of the server."""

    version: str


class Score(Shape):
    """How alike a pair of texts is, from -1 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Shape):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(Shape):
    """A document."""

    text: str


class Ranked(Shape):
    """A document by its index, and how alike it is to the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RankingUsage(Shape):
    """The number of tokens of all texts."""

    total_tokens: int


class Ranking(Shape):
    """The documents, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: RankingUsage


class CompletionTokensDetails(Shape):
    """How many tokens of answers were reasoning."""

    reasoning_tokens: int


class Usage(Shape):
    """The number of tokens of prompts and of generated texts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TextLogprobs(Shape):
    """The log-probabilities of a text's tokens; null for the first token of a prompt that is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shape):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason
    stop_reason: str | None = None


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
    """A generated token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """The log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    """A called function; its arguments are JSON."""

    name: str
    arguments: str


class Call(Shape):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Shape):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(Shape):
    """One of the answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: str | None = None


class ChatCompletion(Shape):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Problem(Shape):
    """The details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Shape):
    """An error."""

    error: Problem


class MessagesProblem(Shape):
    """The details of an error in Anthropic's API."""

    type: str
    message: str


class MessagesRefusal(Shape):
    """An error in Anthropic's API."""

    type: Literal["error"]
    error: MessagesProblem


class OllamaRefusal(Shape):
    """An error in Ollama's API."""

    error: str


class Translated(BaseModel):
    """An answer in the API of others, which describe it."""


def described(
    shape: type[BaseModel], *, stream: str | None = None, refusal: type[Shape] = Refusal
) -> dict[int | str, dict[str, Any]]:
    """The possible answers of an endpoint, also as a `stream` of this media type, for its OpenAPI description."""
    answer: dict[str, Any] = {"model": shape, "description": shape.__doc__}
    if stream == "text/event-stream":
        data = {"type": "string", "description": "A piece of the answer as JSON; `[DONE]` in the last event."}
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        answer["content"] = {stream: {"schema": event}}
    elif stream is not None:
        answer["content"] = {stream: {"schema": {"type": "object"}}}
    return {
        200: answer,
        "4XX": {"model": refusal, "description": "The request cannot be answered as it is."},
        "5XX": {"model": refusal, "description": "The server cannot answer now."},
    }
