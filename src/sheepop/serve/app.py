"""The HTTP application: OpenAI's endpoints, health and metrics, with every error in the shape of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import sheepop
from sheepop.serve import replies
from sheepop.serve.access import Doorkeeper, Gate
from sheepop.serve.analysis import Analysis
from sheepop.serve.answering import Answering
from sheepop.serve.answers import api_error
from sheepop.serve.anthropic_messages import Messages, MessagesStyle
from sheepop.serve.arena import Arena
from sheepop.serve.bodies import route_class
from sheepop.serve.config import ServerConfig
from sheepop.serve.embeddings import Embeddings
from sheepop.serve.inside import Inside
from sheepop.serve.models import Models
from sheepop.serve.ollama import Ollama, OllamaStyle
from sheepop.serve.protocol import (
    MODEL_PATHS,
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    draining,
    error_body,
    refusal_of,
)
from sheepop.serve.registry import Registry
from sheepop.serve.responses import Responses, ResponsesStyle
from sheepop.serve.runs import Runs, RunsPage
from sheepop.serve.votes import VotesFile

_Endpoint = tuple[Callable[..., Any], type[replies.Shape] | None]


def create_app(
    registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper | None = None, runs: Runs | None = None,
    prompts: Sequence[str] = (),
) -> FastAPI:  # fmt: skip
    """Creates the application that serves the models of `registry` to the clients of `doorkeeper` or a file of keys.

    With `config.ui` it also serves the page, which shows `runs` and has an arena that draws from `prompts`.
    """
    page: list[Inside | RunsPage | Arena | Analysis] = []
    if config.ui:
        assert runs is not None
        votes = VotesFile(Path(config.votes).absolute())
        # Inside is last: its route for files matches any name.
        page = [
            RunsPage(runs, votes),
            Arena(registry, votes, prompts, config.deadline_seconds),
            Analysis(registry),
            Inside(registry, records=config.log is not None),
        ]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(registry.close)
        answering.bodies.close()
        if answering.recorder is not None:
            await asyncio.to_thread(answering.recorder.close)
        for part in page:
            part.close()

    app = FastAPI(title="SheepOp", version=sheepop.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    answering = Answering(registry, config, doorkeeper or Doorkeeper(config.api_keys, config.api_key))
    service, embeddings = Service(answering), Embeddings(answering)
    ollama, models = Ollama(answering, embeddings), Models(answering)
    endpoints: dict[str, _Endpoint] = {
        "/health": (service.health, replies.Status),
        "/ready": (service.ready, replies.Status),
        "/version": (service.version, replies.Version),
        "/metrics": (service.show_metrics, None),
        "/v1/models": (models.list, replies.ModelList),
        "/v1/models/{name:path}": (models.show, replies.ModelCard),
        "/v1/chat/completions": (answering.chat_completion, replies.ChatCompletion),
        "/v1/completions": (answering.completion, replies.Completion),
        "/v1/embeddings": (embeddings.embed, replies.EmbeddingList),
        "/v1/score": (embeddings.score, replies.ScoreList),
        "/v1/rerank": (embeddings.rerank, replies.Ranking),
        "/tokenize": (service.tokenize, replies.Tokens),
        "/detokenize": (service.detokenize, replies.Text),
    }
    if answering.recorder is not None:
        endpoints["/v1/votes"] = (answering.recorder.vote, replies.Recorded)
    # The APIs of others; the media type of streams.
    translated: dict[str, tuple[Callable[..., Any], str | None]] = {
        "/v1/messages": (Messages(answering).messages, MessagesStyle.media_type),
        "/v1/responses": (Responses(answering).respond, ResponsesStyle.media_type),
        "/v1/load_lora_adapter": (models.load_adapter, None),
        "/v1/unload_lora_adapter": (models.unload_adapter, None),
        "/api/chat": (ollama.chat, OllamaStyle.media_type),
        "/api/generate": (ollama.generate, OllamaStyle.media_type),
        "/api/show": (ollama.show, None),
        "/api/embed": (ollama.embed, None),
        "/api/tags": (ollama.tags, None),
        "/api/ps": (ollama.running, None),
        "/api/version": (service.version, None),
    }
    app.add_middleware(
        Gate,
        metrics=answering.metrics,
        doorkeeper=answering.doorkeeper,
        paths_with_key=(*MODEL_PATHS, *(("/metrics", "/openapi.json") if config.protect_metrics else ())),
        largest_body=config.max_body_bytes,
    )
    if config.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=config.cors_origins, allow_methods="*", allow_headers="*")
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse)
    app.router.route_class = route_class(answering.bodies)
    for path, (endpoint, shape) in endpoints.items():
        stream = "text/event-stream" if shape in (replies.ChatCompletion, replies.Completion) else None
        app.add_api_route(
            path,
            endpoint,
            methods=["POST" if path in MODEL_PATHS else "GET"],
            response_model=None,
            response_class=PlainTextResponse if shape is None else JSONResponse,
            responses={} if shape is None else replies.described(shape, stream=stream),
        )
    # Clients of Ollama send JSON without saying so.
    others = APIRouter(route_class=app.router.route_class, strict_content_type=False)
    for path, (endpoint, stream) in translated.items():
        refusal: type[replies.Shape] = replies.OllamaRefusal if path.startswith("/api/") else replies.Refusal
        if path == "/v1/messages":
            refusal = replies.MessagesRefusal
        answers = replies.described(replies.Translated, stream=stream, refusal=refusal)
        methods = ["POST" if path in MODEL_PATHS else "GET"]
        others.add_api_route(path, endpoint, methods=methods, response_model=None, responses=answers)
    app.include_router(others)
    for part in page:
        app.include_router(part.routes())
    return app


class Service:
    """The endpoints."""

    def __init__(self, answering: Answering) -> None:
        self._answering, self._registry = answering, answering.registry

    async def health(self) -> dict[str, str]:
        """Answers while the process and all engines live; raises `ApiError` 503 if an engine has ended."""
        for model in self._registry.models():
            if (fault := model.worker.fault) is not None:
                raise api_error(fault)
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """Answers while the server accepts requests; raises `ApiError` 503 as `health`, or while draining."""
        if self._registry.is_draining:
            raise draining()
        await self.health()
        return {"status": "ready"}

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics in Prometheus's text format."""
        return PlainTextResponse(self._answering.metrics.text(), media_type="text/plain; version=0.0.4")

    async def tokenize(self, requested: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text."""
        with await self._answering.ticket(request, requested.model) as ticket:
            reading = ticket.model.prepare(
                ticket.model.encoded,
                requested.prompt,
                with_prefix=requested.add_special_tokens,
                parse_special=requested.parse_special,
            )
            tokens = await self._answering.while_wanted(request, reading, "prompt")
            longest = ticket.model.generator.max_seq_len
            return await self._answering.json({"tokens": tokens, "count": len(tokens), "max_model_len": longest})

    async def detokenize(self, requested: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens."""
        with await self._answering.ticket(request, requested.model) as ticket:
            tokenizer, vocab_size = ticket.model.tokenizer, ticket.model.tokenizer.vocab_size

            def text() -> str:
                if wrong := [token_id for token_id in requested.tokens if not 0 <= token_id < vocab_size]:
                    raise ApiError(400, f"tokens: {wrong[0]} is not in the vocabulary of {vocab_size}.", param="tokens")
                return tokenizer.decode(requested.tokens)

            return await self._answering.json(
                {"prompt": await self._answering.while_wanted(request, ticket.model.prepare(text))}
            )

    async def version(self) -> dict[str, str]:
        """The version of SheepOp."""
        return {"version": sheepop.__version__}


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        code = "not_found" if error.status_code == 404 else None
        refusal = ApiError(error.status_code, f"{request.url.path}: {error.detail}", code=code)
        refusal.headers = error.headers  # a 405 lists the allowed methods
        error = refusal
    return JSONResponse(error_body(error, request.url.path), status_code=error.status_code, headers=error.headers)


async def _refuse_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refuse(request, refusal_of(error.errors()))
