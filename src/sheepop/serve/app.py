"""The HTTP application: OpenAI's endpoints, health and metrics, with every error in the shape of OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import sheepop
from sheepop.core.errors import PromptTooLongError, SheepOpError
from sheepop.generate.engine import Update
from sheepop.serve import replies
from sheepop.serve.access import Doorkeeper, Gate
from sheepop.serve.answer_text import AnswerText, active_sections
from sheepop.serve.answers import (
    DONE,
    Answer,
    api_error,
    as_prompts,
    chat_config,
    completion_config,
    event,
    in_words_of_clients,
)
from sheepop.serve.arena import Arena
from sheepop.serve.bodies import left, route_class, written
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.inside import Inside
from sheepop.serve.logprobs import Tokens
from sheepop.serve.metrics import Metrics, Timing
from sheepop.serve.pieces import ChatPieces, TextPieces, number_of
from sheepop.serve.protocol import (
    MODEL_PATHS,
    ApiError,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    refusal_of,
)
from sheepop.serve.registry import Registry, draining
from sheepop.serve.runs import Runs, RunsPage
from sheepop.serve.served_model import ServedModel
from sheepop.serve.votes import VotesFile
from sheepop.serve.worker import SideWork

_MOST_EMBEDDINGS = 2048
_MOST_BODIES = 4096
# Settings that only the model can check, with their names in the API.
_PARAMETERS = {
    "logit_bias": "logit_bias",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
} | {name: name for name in ("stop_token_ids", "chat_template_kwargs", "continue_final_message", "documents")}
T = TypeVar("T")
Written = AsyncGenerator[list[Update], None]


def create_app(
    registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper | None = None, runs: Runs | None = None,
    prompts: Sequence[str] = (),
) -> FastAPI:  # fmt: skip
    """Creates the application that serves the models of `registry` to the clients of `doorkeeper` or a file of keys.

    With `config.ui` it also serves the page, which shows `runs` and has an arena that draws from `prompts`.
    """
    page: list[Inside | RunsPage | Arena] = []
    if config.ui:
        assert runs is not None
        votes = VotesFile(Path(config.votes).absolute())
        # Inside is last: its route for files matches any name.
        page = [RunsPage(runs, votes), Arena(registry, votes, prompts, config.deadline_seconds), Inside(registry)]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(registry.close)
        service.bodies.close()
        for part in page:
            part.close()

    app = FastAPI(title="SheepOp", version=sheepop.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    service = Service(registry, config, doorkeeper or Doorkeeper(config.api_keys, config.api_key))
    endpoints: dict[str, tuple[Callable[..., Any], type[replies.Shape] | None]] = {
        "/health": (service.health, replies.Status),
        "/ready": (service.ready, replies.Status),
        "/metrics": (service.show_metrics, None),
        "/v1/models": (service.list_models, replies.ModelList),
        "/v1/models/{name:path}": (service.show_model, replies.ModelCard),
        "/v1/chat/completions": (service.chat, replies.ChatCompletion),
        "/v1/completions": (service.complete, replies.Completion),
        "/v1/embeddings": (service.embed, replies.EmbeddingList),
        "/tokenize": (service.tokenize, replies.Tokens),
        "/detokenize": (service.detokenize, replies.Text),
    }
    app.add_middleware(
        Gate,
        metrics=service.metrics,
        doorkeeper=service.doorkeeper,
        model_paths=MODEL_PATHS,
        largest_body=config.max_body_bytes,
    )
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse)
    app.router.route_class = route_class(service.bodies)
    for path, (endpoint, shape) in endpoints.items():
        streams = shape in (replies.ChatCompletion, replies.Completion)
        app.add_api_route(
            path,
            endpoint,
            methods=["POST" if path in MODEL_PATHS else "GET"],
            response_model=None,
            response_class=PlainTextResponse if shape is None else JSONResponse,
            responses={} if shape is None else replies.described(shape, streams=streams),
        )
    for part in page:
        app.include_router(part.routes())
    return app


class Service:
    """The endpoints and their shared state."""

    def __init__(self, registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self._registry, self._config = registry, config
        self.bodies = SideWork("bodies", threads=1, most=_MOST_BODIES)
        self.doorkeeper, self.metrics = doorkeeper, Metrics(registry)

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
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> dict[str, Any]:
        """The models of this server."""
        self.doorkeeper.client(request.headers)
        return {"object": "list", "data": [_described(model) for model in self._registry.models()]}

    async def show_model(self, name: str, request: Request) -> dict[str, Any]:
        """One model."""
        self.doorkeeper.client(request.headers)
        return _described(self._registry.model(name))

    async def tokenize(self, requested: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text."""
        with self._ticket(request, requested.model) as ticket:
            reading = ticket.model.prepare(
                ticket.model.encoded,
                requested.prompt,
                with_prefix=requested.add_special_tokens,
                parse_special=requested.parse_special,
            )
            tokens = await self._while_wanted(request, reading, "prompt")
            longest = ticket.model.generator.max_seq_len
            return await self._json({"tokens": tokens, "count": len(tokens), "max_model_len": longest})

    async def detokenize(self, requested: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens."""
        with self._ticket(request, requested.model) as ticket:
            tokenizer, vocab_size = ticket.model.tokenizer, ticket.model.tokenizer.vocab_size

            def text() -> str:
                if wrong := [token_id for token_id in requested.tokens if not 0 <= token_id < vocab_size]:
                    raise ApiError(400, f"tokens: {wrong[0]} is not in the vocabulary of {vocab_size}.", param="tokens")
                return tokenizer.decode(requested.tokens)

            return await self._json({"prompt": await self._while_wanted(request, ticket.model.prepare(text))})

    async def embed(self, requested: EmbeddingRequest, request: Request) -> Response:
        """A vector for each text: the mean of the last hidden states, with length 1."""
        with self._ticket(request, requested.model) as ticket:
            prompts = as_prompts(requested.input, "input", _MOST_EMBEDDINGS)

            vectors, count = await self._while_wanted(request, ticket.model.embed(prompts), "input")
            data: list[dict[str, Any]] = []
            for index, vector in enumerate(vectors):
                packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                embedding = vector if requested.encoding_format == "float" else packed
                data.append({"object": "embedding", "index": index, "embedding": embedding})
            usage = {"prompt_tokens": count, "total_tokens": count}
            return await self._json({"object": "list", "data": data, "model": ticket.model.name, "usage": usage})

    async def complete(self, requested: CompletionRequest, request: Request) -> Response:
        """Continues texts."""
        if requested.stream and requested.best_of not in (None, requested.n):
            raise ApiError(400, "best_of: cannot be streamed.", param="best_of")
        with self._ticket(request, requested.model) as ticket:
            most = self._config.max_running + self._config.max_waiting
            config = completion_config(requested, ticket.model.generator.defaults)
            prompts = as_prompts(requested.prompt, "prompt", most)
            if requested.parse_special or not requested.add_special_tokens:
                how = {"with_prefix": requested.add_special_tokens, "parse_special": requested.parse_special}

                def read() -> list[Sequence[int]]:
                    return [ticket.model.encoded(each, **how) for each in prompts]

                prompts = await self._while_wanted(request, ticket.model.prepare(read), "prompt")
            making = ticket.model.requests(prompts, config, priority=requested.priority, tenant=ticket.tenant)
            requests = await self._while_wanted(request, making, "prompt")
            scored: Sequence[Tokens] = ()
            if requested.echo and requested.logprobs is not None:
                scoring = ticket.model.score(requests, requested.logprobs)
                scored = await self._while_wanted(request, scoring, "prompt")
            answer = Answer("text_completion", ticket.model, requests, writes=requested.max_tokens != 0)
            return await self._respond(answer, TextPieces(answer, requested, scored), requested, ticket, request)

    async def chat(self, requested: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        with self._ticket(request, requested.model) as ticket:

            def read() -> list[int]:
                messages = [message.to_template() for message in requested.messages]
                return ticket.model.read_chat(
                    messages,
                    requested.for_template(),
                    requested.variables(),
                    parse_special=requested.parse_special,
                )

            prompt = await self._while_wanted(request, ticket.model.prepare(read), "messages")
            room = ticket.model.room(len(prompt), requested.n)
            config = chat_config(requested, room, ticket.model.generator.defaults)
            making = ticket.model.requests(
                [prompt],
                config,
                priority=requested.priority,
                tenant=ticket.tenant,
                shown_ids=ticket.model.shown_ids(active_sections(requested, ticket.model.sections)),
            )
            requests = await self._while_wanted(request, making, "messages")
            answer = Answer("chat.completion", ticket.model, requests)
            split = partial(AnswerText, requested, ticket.model.sections, ticket.model.begins_in(prompt))
            return await self._respond(answer, ChatPieces(answer, requested, split), requested, ticket, request)

    async def _json(self, value: dict[str, Any]) -> Response:
        """Answers with JSON that is written beside the event loop, since it may be large."""
        return Response(await self.bodies.do(written, value), media_type="application/json")

    def _ticket(self, request: Request, model: str) -> Ticket:
        return Ticket(self.doorkeeper, self._registry, request.headers, model)

    async def _while_wanted(self, request: Request, work: Awaitable[T], param: str | None = None) -> T:
        """Awaits `work` on the field `param`; cancels it if the client disconnects or it takes too long."""
        try:
            return await while_wanted(request, work, self._config.deadline_seconds)
        except PromptTooLongError as error:
            raise ApiError(400, in_words_of_clients(error), param=param, code="context_length_exceeded") from None
        except SheepOpError as error:
            named = _PARAMETERS.get(str(error).partition(" ")[0].rstrip(":"), param)
            raise ApiError(400, str(error), param=named, code="invalid_value") from None

    async def _respond(
        self,
        answer: Answer,
        pieces: TextPieces | ChatPieces,
        requested: CompletionRequest | ChatRequest,
        ticket: Ticket,
        request: Request,
    ) -> Response:
        written = answer.write(self._config.deadline_seconds)
        if requested.stream:
            # If the engine refuses the request, the status says so, which must precede the stream.
            await self._while_wanted(request, anext(written))
            include_usage = requested.stream_options is not None and requested.stream_options.include_usage
            events = self._events(answer, written, pieces, include_usage=include_usage)
            return _EventStream(events, written, ticket.transfer())
        await self._while_wanted(request, self._write(answer, written))
        choices = [pieces.whole(update, number) for number, update in enumerate(answer.whole())]
        return await self._json({**answer.head(), "choices": choices, "usage": answer.usage()})

    async def _write(self, answer: Answer, written: Written) -> None:
        timing = Timing(self.metrics, answer.model.name)
        try:
            async with aclosing(written):
                async for updates in written:
                    if updates:
                        timing.token()
        finally:
            self._count(answer)

    async def _events(
        self, answer: Answer, written: Written, pieces: TextPieces | ChatPieces, *, include_usage: bool
    ) -> AsyncGenerator[str, None]:
        """Yields the answer as server-sent events, those of a step together; an error on the way is an event, too."""
        timing = Timing(self.metrics, answer.model.name)
        head = answer.head(".chunk" if answer.kind == "chat.completion" else "")
        usage = {"usage": None} if include_usage else {}
        try:
            async for updates in written:
                timing.token()
                events = [
                    event({**head, "choices": [choice], **usage})
                    for update in updates
                    for choice in pieces.piece(update, number_of(update))
                ]
                if events:
                    yield "".join(events)
            if include_usage:
                yield event({**head, "choices": [], "usage": answer.usage()})
            yield DONE
        except ApiError as error:
            yield event(error.body)
        finally:
            self._count(answer)

    def _count(self, answer: Answer) -> None:
        usage = answer.usage()
        self.metrics.prompt_tokens.labels(answer.model.name).inc(usage["prompt_tokens"])
        self.metrics.completion_tokens.labels(answer.model.name).inc(usage["completion_tokens"])


class Ticket:
    """A client's request for a model: counts for both until the context ends."""

    def __init__(self, doorkeeper: Doorkeeper, registry: Registry, headers: Mapping[str, str], model: str) -> None:
        client = doorkeeper.client(headers)
        with ExitStack() as stack:
            client.enter()
            stack.callback(client.leave)
            self.model: ServedModel = stack.enter_context(registry.using(model))
            self._stack = stack.pop_all()
        self.tenant = client.settings.name

    def transfer(self) -> ExitStack:
        """Moves the counts to a stack whose owner ends them; leaving the ticket then does nothing."""
        return self._stack.pop_all()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _EventStream(StreamingResponse):
    """A stream of events that ends its generation and closes `stack` even if it is never read."""

    def __init__(self, events: AsyncGenerator[str, None], written: Written, stack: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._written, self._stack = events, written, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            async with aclosing(self._written), aclosing(self._events):
                await super().__call__(scope, receive, send)


def _described(model: ServedModel) -> dict[str, Any]:
    found = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sheepop"}
    return {**found, "max_model_len": model.generator.max_seq_len}


async def while_wanted(request: Request, work: Awaitable[T], seconds: float) -> T:
    """Awaits `work`; cancels it and raises `ApiError` if the client disconnects or `seconds` pass."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise left()
        raise ApiError(
            504, f"The request took longer than {seconds:g} s.", kind="server_error", code="deadline_exceeded"
        )
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        code = "not_found" if error.status_code == 404 else None
        refusal = ApiError(error.status_code, f"{request.url.path}: {error.detail}", code=code)
        refusal.headers = error.headers  # a 405 lists the allowed methods
        error = refusal
    return JSONResponse(error.body, status_code=error.status_code, headers=error.headers)


async def _refuse_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refuse(request, refusal_of(error.errors()))
