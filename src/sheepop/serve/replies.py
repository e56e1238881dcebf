"""The shapes of answers for the OpenAPI description of the API; the server does not validate its answers by them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

Reason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    """The base class of all shapes."""

    model_config = ConfigDict(extra="forbid")


def _shape(name: str, meaning: str, base: type[Shape] = Shape, /, **fields: Any) -> type[Shape]:
    """A shape with these fields besides those of `base`: each has a type, or a type and a value if it is left out."""
    typed: dict[str, Any] = {
        field: found if isinstance(found, tuple) else (found, ...) for field, found in fields.items()
    }
    return create_model(name, __base__=base, __doc__=meaning, **typed)


def _many(shape: type[Shape]) -> Any:
    """The type of a list of shapes."""
    return list.__class_getitem__(shape)


Status = _shape("Status", "The state of the server.", status=Literal["ok", "ready"])
ModelCard = _shape(
    "ModelCard", "A model, with its own settings for what a request leaves out.", id=str, object=Literal["model"],
    created=int, owned_by=str, max_model_len=int, root=str, parent=str | None,
    state=Literal["loaded", "loading", "unloaded"], size=int, default_sampling_params=dict[str, Any],
)  # fmt: skip
ModelList = _shape("ModelList", "All models.", object=Literal["list"], data=_many(ModelCard))
Tokens = _shape("Tokens", "The tokens of a text.", tokens=list[int], count=int, max_model_len=int)
Text = _shape("Text", "The text of tokens.", prompt=str)
EmbeddingUsage = _shape("EmbeddingUsage", "The number of tokens of texts.", prompt_tokens=int, total_tokens=int)
Embedding = _shape(
    "Embedding", "The vector of a text: numbers, or on request little-endian float32 in base64.",
    object=Literal["embedding"], index=int, embedding=list[float] | str,
)  # fmt: skip
EmbeddingList = _shape(
    "EmbeddingList", "The vectors of texts, in the order of the texts.", object=Literal["list"], data=_many(Embedding),
    model=str, usage=EmbeddingUsage,
)  # fmt: skip
PromptTokensDetails = _shape("PromptTokensDetails", "How many tokens of prompts were in the cache.", cached_tokens=int)
Version = _shape("Version", "The version of the server.", version=str)
Recorded = _shape("Recorded", "A vote that was recorded.", id=str, recorded=Literal[True])
Score = _shape("Score", "How alike a pair of texts is, from -1 to 1.", index=int, object=Literal["score"], score=float)
ScoreList = _shape(
    "ScoreList", "The scores of all pairs.", id=str, object=Literal["list"], model=str, data=_many(Score),
    usage=EmbeddingUsage,
)  # fmt: skip
RankedText = _shape("RankedText", "A document.", text=str)
Ranked = _shape(
    "Ranked", "A document by its index, and how alike it is to the query.", index=int, relevance_score=float,
    document=(RankedText | None, None),
)  # fmt: skip
RankingUsage = _shape("RankingUsage", "The number of tokens of all texts.", total_tokens=int)
Ranking = _shape(
    "Ranking", "The documents, the best first.", id=str, model=str, results=_many(Ranked), usage=RankingUsage,
)  # fmt: skip
CompletionTokensDetails = _shape(
    "CompletionTokensDetails", "How many tokens of answers were reasoning.", reasoning_tokens=int,
)  # fmt: skip
Usage = _shape(
    "Usage", "The number of tokens of prompts and of generated texts.", prompt_tokens=int, completion_tokens=int,
    total_tokens=int, prompt_tokens_details=PromptTokensDetails,
    completion_tokens_details=(CompletionTokensDetails | None, None),
)  # fmt: skip
TextLogprobs = _shape(
    "TextLogprobs", "The log-probabilities of a text's tokens; null for the first token of a prompt that is echoed.",
    tokens=list[str], token_logprobs=list[float | None], top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
)  # fmt: skip
TextChoice = _shape(
    "TextChoice", "One of the texts.", index=int, text=str, logprobs=TextLogprobs | None, finish_reason=Reason,
    stop_reason=(str | None, None),
)  # fmt: skip
Completion = _shape(
    "Completion", "Texts that continue prompts.", id=str, object=Literal["text_completion"], created=int, model=str,
    system_fingerprint=str, choices=_many(TextChoice), usage=Usage,
)  # fmt: skip
TopLogprob = _shape("TopLogprob", "A token and its log-probability.", token=str, logprob=float, bytes=list[int])
TokenLogprob = _shape(
    "TokenLogprob", "A generated token, and the likeliest tokens at its position.", TopLogprob,
    top_logprobs=_many(TopLogprob),
)  # fmt: skip
ChatLogprobs = _shape(
    "ChatLogprobs", "The log-probabilities of a message's tokens.", content=_many(TokenLogprob), refusal=None,
)  # fmt: skip
CalledFunction = _shape("CalledFunction", "A called function; its arguments are JSON.", name=str, arguments=str)
Call = _shape("Call", "A tool call.", id=str, type=Literal["function"], function=CalledFunction)
Message = _shape(
    "Message", "The answer of the model.", role=Literal["assistant"], content=str | None, refusal=None,
    reasoning_content=(str | None, None), tool_calls=(_many(Call) | None, None),
)  # fmt: skip
ChatChoice = _shape(
    "ChatChoice", "One of the answers.", index=int, message=Message, logprobs=ChatLogprobs | None, finish_reason=Reason,
    stop_reason=(str | None, None),
)  # fmt: skip
ChatCompletion = _shape(
    "ChatCompletion", "Answers to a conversation.", id=str, object=Literal["chat.completion"], created=int, model=str,
    system_fingerprint=str, choices=_many(ChatChoice), usage=Usage,
)  # fmt: skip
Problem = _shape("Problem", "The details of an error.", message=str, type=str, param=str | None, code=str | None)
Refusal = _shape("Refusal", "An error.", error=Problem)
MessagesProblem = _shape("MessagesProblem", "The details of an error in Anthropic's API.", type=str, message=str)
MessagesRefusal = _shape(
    "MessagesRefusal", "An error in Anthropic's API.", type=Literal["error"], error=MessagesProblem,
)  # fmt: skip
OllamaRefusal = _shape("OllamaRefusal", "An error in Ollama's API.", error=str)


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
