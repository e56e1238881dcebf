"""The HTTP application: OpenAI's endpoints, health, metrics; every error in the shape that clients know."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import sheepop
from sheepop.core.errors import SheepOpError, UsageError
from sheepop.generate import GenerationConfig
from sheepop.generate.prompt import read_prompt
from sheepop.generate.request import Request as TextRequest
from sheepop.serve.access import Doorkeeper
from sheepop.serve.answers import Answer, as_prompts, chat_config, completion_config
from sheepop.serve.config import ServerConfig
from sheepop.serve.gate import Gate
from sheepop.serve.metrics import Metrics, Timing
from sheepop.serve.pieces import ChatPieces, TextPieces
from sheepop.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    refusal_of,
)
from sheepop.serve.registry import Registry, draining
from sheepop.serve.served_model import ServedModel

_DONE = "data: [DONE]\n\n"


def create_app(registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper | None = None) -> FastAPI:
    """The application that serves the models of `registry`, to clients that `doorkeeper` or a file of keys knows."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(registry.close)

    app = FastAPI(title="SheepOp", version=sheepop.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    service = Service(registry, config, doorkeeper or Doorkeeper(config.api_keys))
    app.add_middleware(Gate, metrics=service.metrics, largest_body=config.max_body_bytes)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse_http)
    reading: dict[str, Callable[..., Any]] = {
        "/health": service.health,
        "/ready": service.ready,
        "/metrics": service.show_metrics,
        "/v1/models": service.list_models,
        "/v1/models/{name:path}": service.show_model,
    }
    asking: dict[str, Callable[..., Any]] = {
        "/v1/chat/completions": service.chat,
        "/v1/completions": service.complete,
        "/v1/embeddings": service.embed,
        "/tokenize": service.tokenize,
        "/detokenize": service.detokenize,
    }
    for path, endpoint in reading.items():
        app.add_api_route(path, endpoint, methods=["GET"])
    for path, endpoint in asking.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    return app


class Service:
    """The endpoints, and what they share."""

    def __init__(self, registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self._registry, self._config = registry, config
        self._doorkeeper, self.metrics = doorkeeper, Metrics(registry)

    async def health(self) -> dict[str, str]:
        """Answers as long as the process lives."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """Answers while requests are taken."""
        if self._registry.is_draining:
            raise draining()
        return {"status": "ready"}

    async def show_metrics(self) -> PlainTextResponse:
        """The metrics, as Prometheus reads them."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> dict[str, Any]:
        """All models."""
        self._doorkeeper.client(request.headers.get("authorization"))
        return {"object": "list", "data": [_described(model) for model in self._registry.models()]}

    async def show_model(self, name: str, request: Request) -> dict[str, Any]:
        """One model."""
        self._doorkeeper.client(request.headers.get("authorization"))
        return _described(self._registry.model(name))

    async def tokenize(self, asked: TokenizeRequest, request: Request) -> dict[str, Any]:
        """The tokens of a text."""
        with self._ticket(request, asked.model) as ticket:
            tokenizer = ticket.model.tokenizer
            tokens = [*(tokenizer.prefix_ids if asked.add_special_tokens else ()), *tokenizer.encode(asked.prompt)]
            longest = ticket.model.generator.model.config.max_seq_len
            return {"tokens": tokens, "count": len(tokens), "max_model_len": longest}

    async def detokenize(self, asked: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """The text of tokens."""
        with self._ticket(request, asked.model) as ticket:
            vocab_size = ticket.model.tokenizer.vocab_size
            if wrong := [token_id for token_id in asked.tokens if not 0 <= token_id < vocab_size]:
                raise ApiError(400, f"tokens: {wrong[0]} is not in the vocabulary of {vocab_size}.", param="tokens")
            return {"prompt": ticket.model.tokenizer.decode(asked.tokens)}

    async def embed(self, asked: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """A vector for each text: the mean of the last hidden states, with length 1."""
        with self._ticket(request, asked.model) as ticket:
            data, count, model = [], 0, ticket.model
            for index, prompt in enumerate(as_prompts(asked.input, "input")):
                try:
                    read = read_prompt("input", prompt, model.generator.model, model.tokenizer, "refuse")
                except UsageError as error:
                    raise ApiError(400, str(error), param="input") from None
                vector = await asyncio.to_thread(model.embed, read.token_ids)
                count += len(read.token_ids)
                packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                embedding = vector if asked.encoding_format == "float" else packed
                data.append({"object": "embedding", "index": index, "embedding": embedding})
            usage = {"prompt_tokens": count, "total_tokens": count}
            return {"object": "list", "data": data, "model": model.name, "usage": usage}

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Continues texts."""
        if asked.stream and asked.best_of not in (None, asked.n):
            raise ApiError(400, "best_of: cannot be streamed.", param="best_of")
        ticket = self._ticket(request, asked.model)
        with ticket.on_error():
            config, prompts = completion_config(asked), as_prompts(asked.prompt, "prompt")
            requests = self._requests(prompts, config, asked.priority, ticket, "prompt")
            answer = Answer("text_completion", ticket.model, requests)
            return await self._respond(answer, TextPieces(answer, asked), asked, ticket, request)

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        ticket = self._ticket(request, asked.model)
        with ticket.on_error():
            messages = [message.to_template() for message in asked.messages]
            tools = None if not asked.tools or asked.tool_choice == "none" else [t.model_dump() for t in asked.tools]
            try:
                prompt = await asyncio.to_thread(ticket.model.render, messages, tools)
            except SheepOpError as error:
                raise ApiError(400, str(error), param="messages") from None
            config = chat_config(asked, ticket.model.generator.model.config.max_seq_len - len(prompt))
            requests = self._requests([prompt], config, asked.priority, ticket, "messages")
            answer = Answer("chat.completion", ticket.model, requests)
            return await self._respond(answer, ChatPieces(answer, asked), asked, ticket, request)

    def _ticket(self, request: Request, model: str) -> Ticket:
        return Ticket(self._doorkeeper, self._registry, request.headers.get("authorization"), model)

    def _requests(
        self, prompts: Sequence[str | list[int]], config: GenerationConfig, priority: int, ticket: Ticket, param: str
    ) -> list[TextRequest]:
        try:
            return [
                ticket.model.request(prompt, config, index=index, priority=priority, tenant=ticket.tenant)
                for index, prompt in enumerate(prompts)
            ]
        except SheepOpError as error:
            code = "context_length_exceeded" if "max_seq_len" in str(error) else "invalid_value"
            raise ApiError(400, str(error), param=param, code=code) from None

    async def _respond(
        self,
        answer: Answer,
        pieces: TextPieces | ChatPieces,
        asked: CompletionRequest | ChatRequest,
        ticket: Ticket,
        request: Request,
    ) -> Response:
        if asked.stream:
            include_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = self._events(answer, pieces, ticket, include_usage=include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            await unless_left(request, self._write(answer))
        finally:
            ticket.leave()
        chosen = [candidate for request in answer.requests for candidate in request.chosen()]
        choices = [pieces.whole(candidate, number) for number, candidate in enumerate(chosen)]
        return JSONResponse({**answer.head(), "choices": choices, "usage": answer.usage().to_dict()})

    async def _write(self, answer: Answer) -> None:
        timing = Timing(self.metrics, answer.model.name)
        async for _ in answer.write(self._config.deadline_seconds):
            timing.token()
        self._count(answer)

    async def _events(
        self, answer: Answer, pieces: TextPieces | ChatPieces, ticket: Ticket, *, include_usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events; an error in the middle is an event, too."""
        timing = Timing(self.metrics, answer.model.name)
        head = answer.head(".chunk" if answer.kind == "chat.completion" else "")
        usage = {"usage": None} if include_usage else {}
        try:
            async for update in answer.write(self._config.deadline_seconds):
                timing.token()
                candidate = update.candidate
                number = candidate.index + answer.requests.index(candidate.request) * candidate.request.num_candidates
                for choice in pieces.piece(candidate, number, update.text):
                    yield event({**head, "choices": [choice], **usage})
            if include_usage:
                yield event({**head, "choices": [], "usage": answer.usage().to_dict()})
            yield _DONE
        except ApiError as error:
            yield event(error.body)
        finally:
            self._count(answer)
            ticket.leave()

    def _count(self, answer: Answer) -> None:
        usage = answer.usage()
        self.metrics.prompt_tokens.labels(answer.model.name).inc(usage.prompt_tokens)
        self.metrics.completion_tokens.labels(answer.model.name).inc(usage.completion_tokens)


class Ticket:
    """A client's request for a model: both are held until it leaves, however it ends."""

    def __init__(self, doorkeeper: Doorkeeper, registry: Registry, authorization: str | None, model: str) -> None:
        client = doorkeeper.client(authorization)
        with ExitStack() as held:
            client.enter()
            held.callback(client.leave)
            self.model: ServedModel = held.enter_context(registry.using(model))
            self._held = held.pop_all()
        self.tenant = client.settings.name

    def leave(self) -> None:
        """Lets go of client and model; a second time does nothing."""
        self._held.close()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def on_error(self) -> ExitStack:
        """A context that leaves when it ends with an error, and only then."""

        def leave(kind: object, *_: object) -> None:
            if kind is not None:
                self.leave()

        stack = ExitStack()
        stack.push(leave)
        return stack


def _described(model: ServedModel) -> dict[str, Any]:
    longest = model.generator.model.config.max_seq_len
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sheepop",
        "max_model_len": longest,
    }


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


async def unless_left(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Does some work, and ends it when the client closes the connection; raises `ApiError` 499 then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has closed the connection.", kind="client_error")
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _refuse_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refuse(request, refusal_of(error.errors()))


async def _refuse_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else None
    return await _refuse(request, ApiError(error.status_code, f"{request.url.path}: {error.detail}", code=code))
