"""Embeddings of texts, and what is computed from them: scores of pairs, and rankings of documents."""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field

from sheepop.serve.answering import Answering
from sheepop.serve.answers import as_prompts
from sheepop.serve.protocol import ApiError, ModelName, Prompts, RequestModel

_MOST_TEXTS = 2048
Texts = str | Annotated[list[str], Field(min_length=1, max_length=_MOST_TEXTS)]


class EmbeddingRequest(RequestModel):
    """``POST /v1/embeddings``."""

    model: ModelName
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class ScoreRequest(RequestModel):
    """``POST /v1/score``: the first text against each of the second, or as many pairs."""

    model: ModelName
    text_1: Texts
    text_2: Texts
    user: str | None = None


class RerankRequest(RequestModel):
    """``POST /v1/rerank``."""

    model: ModelName
    query: str
    documents: Annotated[list[str], Field(min_length=1, max_length=_MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    user: str | None = None


class Embeddings:
    """The endpoints that read texts as vectors of length 1."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def vectors(
        self, request: Request, model: str, texts: str | Sequence[Any], param: str
    ) -> tuple[list[list[float]], int]:
        """The vectors of the texts in the field `param`, and the number of all tokens; raises `ApiError`."""
        with await self._answering.ticket(request, model) as ticket:
            prompts = as_prompts(texts, param, _MOST_TEXTS)
            return await self._answering.while_wanted(request, ticket.model.embed(prompts), param)

    async def embed(self, requested: EmbeddingRequest, request: Request) -> Response:
        """A vector of length 1 for each text, made of the last hidden states."""
        vectors, count = await self.vectors(request, requested.model, requested.input, "input")

        def shown(vector: list[float]) -> list[float] | str:
            if requested.encoding_format == "float":
                return vector
            return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

        def answer() -> dict[str, Any]:
            data = [
                {"object": "embedding", "index": index, "embedding": shown(vector)}
                for index, vector in enumerate(vectors)
            ]
            return {"object": "list", "data": data, "model": requested.model, "usage": _usage(count)}

        return await self._answering.json(answer)

    async def score(self, requested: ScoreRequest, request: Request) -> Response:
        """The cosine of the angle between the vectors of each pair of texts."""
        first, second = ([text] if isinstance(text, str) else text for text in (requested.text_1, requested.text_2))
        if len(first) not in (1, len(second)):
            message = f"text_1: there are {len(first)} texts for {len(second)} of text_2. Give one, or as many."
            raise ApiError(400, message, param="text_1", code="invalid_value")
        vectors, count = await self.vectors(request, requested.model, [*first, *second], "text_2")

        def answer() -> dict[str, Any]:
            one, other = vectors[: len(first)], vectors[len(first) :]
            scores = map(_cosine, one if len(one) == len(other) else one * len(other), other)
            data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
            name = f"score-{secrets.token_hex(12)}"
            return {"id": name, "object": "list", "model": requested.model, "data": data, "usage": _usage(count)}

        return await self._answering.json(answer)

    async def rerank(self, requested: RerankRequest, request: Request) -> Response:
        """The documents, those first whose vectors have the smallest angle to the query's."""
        texts = [requested.query, *requested.documents]
        (query, *documents), count = await self.vectors(request, requested.model, texts, "documents")

        def answer() -> dict[str, Any]:
            scores = [_cosine(query, vector) for vector in documents]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[: requested.top_n]
            results = [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": {"text": requested.documents[index]}} if requested.return_documents else {}),
                }
                for index in order
            ]
            name = f"rerank-{secrets.token_hex(12)}"
            return {"id": name, "model": requested.model, "results": results, "usage": {"total_tokens": count}}

        return await self._answering.json(answer)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": count, "total_tokens": count}
