"""Answering: from a checked request to an answer of the engine, whole or as a stream, in the style of an API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sheepop.core.errors import PromptTooLongError, SheepOpError
from sheepop.generate.updates import Update
from sheepop.serve.access import Doorkeeper
from sheepop.serve.answer_text import AnswerText, active_sections
from sheepop.serve.answers import (
    DONE,
    Answer,
    as_prompts,
    chat_config,
    completion_config,
    event,
    in_words_of_clients,
)
from sheepop.serve.bodies import left, written
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.logprobs import Tokens
from sheepop.serve.metrics import Metrics, Timing
from sheepop.serve.pieces import ChatPieces, TextPieces, number_of
from sheepop.serve.protocol import ApiError, CompletionRequest
from sheepop.serve.recording import HEADERS, Recorder, Transcript
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import SideWork

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
Watched = AbstractContextManager[Callable[[list[Update]], None]]
Chunks = AsyncIterator[list[dict[str, Any]]]
"""The chunks of a streamed chat in OpenAI's API, those of a step together; the last has the usage and no choices."""


class Style(Protocol):
    """How an API writes an answer, from what OpenAI's API writes."""

    media_type: str

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The body of a whole answer."""

    def events(self, chunks: Chunks, num_prompt_tokens: int) -> AsyncIterator[str]:
        """The text of a stream; an `ApiError` of `chunks` becomes a part of it."""


async def one_by_one(chunks: Chunks) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, one at a time."""
    async for step in chunks:
        for chunk in step:
            yield chunk


class OpenAIStyle:
    """The style of OpenAI's API: the usage is a part of a stream only on request."""

    media_type = "text/event-stream"

    def __init__(self, requested: CompletionRequest | ChatRequest) -> None:
        options = requested.stream_options
        self._with_usage = options is not None and options.include_usage

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The completion itself."""
        return completion

    async def events(self, chunks: Chunks, num_prompt_tokens: int) -> AsyncIterator[str]:
        """One server-sent event for each chunk."""
        usage = {"usage": None} if self._with_usage else {}
        try:
            async for found in chunks:
                shown = [chunk for chunk in found if chunk["choices"] or self._with_usage]
                if shown:
                    yield "".join(event({**usage, **chunk}) for chunk in shown)
            yield DONE
        except ApiError as error:
            yield event(error.body)


class Answering:
    """Answers the requests of clients with the models of a registry."""

    def __init__(self, registry: Registry, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self.registry, self.config, self.doorkeeper = registry, config, doorkeeper
        self.metrics = Metrics(registry.models)
        self.recorder = None if config.log is None else Recorder(config, doorkeeper, self.metrics)
        self.bodies = SideWork("bodies", threads=1, most=_MOST_BODIES)

    async def completion(self, requested: CompletionRequest, request: Request) -> Response:
        """Continues texts."""
        return await self.complete(requested, request, OpenAIStyle(requested))

    async def chat_completion(self, requested: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await self.chat(requested, request, OpenAIStyle(requested))

    async def complete(self, requested: CompletionRequest, request: Request, style: Style) -> Response:
        """Continues texts in the style of an API."""
        if requested.stream and requested.best_of not in (None, requested.n):
            raise ApiError(400, "best_of: cannot be streamed.", param="best_of")
        with await self.ticket(request, requested.model) as ticket:
            most = self.config.max_running + self.config.max_waiting
            config = await self.bodies.do(completion_config, requested, ticket.model.generator.defaults)
            prompts = as_prompts(requested.prompt, "prompt", most)
            if requested.parse_special or not requested.add_special_tokens:
                how = {"with_prefix": requested.add_special_tokens, "parse_special": requested.parse_special}

                def encoded() -> list[str | list[int]]:
                    return [ticket.model.encoded(each, **how) for each in prompts]

                prompts = await self.while_wanted(request, ticket.model.prepare(encoded), "prompt")
            making = ticket.model.requests(prompts, config, priority=requested.priority, tenant=ticket.tenant)
            requests = await self.while_wanted(request, making, "prompt")
            scored: Sequence[Tokens] = ()
            if requested.echo and requested.logprobs is not None:
                scoring = ticket.model.score(requests, requested.logprobs)
                scored = await self.while_wanted(request, scoring, "prompt")
            answer = Answer("text_completion", ticket.model, requests, writes=requested.max_tokens != 0)
            return await self._respond(answer, TextPieces(answer, requested, scored), requested, ticket, request, style)

    async def chat(self, requested: ChatRequest, request: Request, style: Style) -> Response:
        """Answers a conversation in the style of an API."""
        with await self.ticket(request, requested.model) as ticket:

            def read() -> list[int]:
                messages = [message.to_template() for message in requested.messages]
                return ticket.model.read_chat(
                    messages,
                    requested.for_template(),
                    requested.variables(),
                    parse_special=requested.parse_special,
                )

            prompt = await self.while_wanted(request, ticket.model.prepare(read), "messages")
            room = ticket.model.room(len(prompt), requested.n)
            config = await self.bodies.do(chat_config, requested, room, ticket.model.generator.defaults)
            making = ticket.model.requests(
                [prompt],
                config,
                priority=requested.priority,
                tenant=ticket.tenant,
                shown_ids=ticket.model.shown_ids(active_sections(requested, ticket.model.sections)),
            )
            requests = await self.while_wanted(request, making, "messages")
            answer = Answer("chat.completion", ticket.model, requests)
            split = partial(AnswerText, requested, ticket.model.sections, ticket.model.begins_in(prompt))
            return await self._respond(answer, ChatPieces(answer, requested, split), requested, ticket, request, style)

    async def json(
        self, value: dict[str, Any] | Callable[[], dict[str, Any]], headers: dict[str, str] | None = None
    ) -> Response:
        """Answers with JSON that is made and written beside the event loop, since it may be large."""
        made = await self.bodies.do(value) if callable(value) else value
        return Response(await self.bodies.do(written, made), media_type="application/json", headers=headers)

    async def ticket(self, request: Request, model: str) -> Ticket:
        """Admits a request to a model, which is loaded first if it is not; raises `ApiError`."""
        client = self.doorkeeper.client(request.headers)
        with ExitStack() as stack:
            client.enter()
            stack.callback(client.leave)
            found = await self.while_wanted(request, self.registry.entered(model), "model")
            stack.callback(self.registry.leave, found)
            return Ticket(found, client.settings.name, stack.pop_all())

    async def while_wanted(self, request: Request, work: Awaitable[T], param: str | None = None) -> T:
        """Awaits `work` on the field `param`; cancels it if the client disconnects or it takes too long."""
        try:
            return await while_wanted(request, work, self.config.deadline_seconds)
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
        style: Style,
    ) -> Response:
        written = answer.write(self.config.deadline_seconds)
        transcript, headers = None, {}
        if self.recorder is not None and self.recorder.wants(requested):
            transcript, headers = Transcript(answer, requested, request.url.path), HEADERS
        watched = self._watched(answer, pieces, ticket.tenant, transcript)
        if requested.stream:
            # If the engine refuses the request, the status says so, which must precede the stream.
            await self.while_wanted(request, anext(written))
            events = style.events(self._chunks(answer, written, pieces, watched), answer.usage()["prompt_tokens"])
            return _EventStream(events, style.media_type, written, ticket.transfer(), headers)
        await self.while_wanted(request, self._write(written, pieces, watched))
        choices = [pieces.whole(update, number) for number, update in enumerate(answer.whole())]
        return await self.json(style.whole({**answer.head(), "choices": choices, "usage": answer.usage()}), headers)

    async def _write(self, written: Written, pieces: TextPieces | ChatPieces, watched: Watched) -> None:
        with watched as step:
            async with aclosing(written):
                async for updates in written:
                    if updates:
                        step(updates)
                    for update in updates:
                        pieces.add(update, number_of(update))

    async def _chunks(
        self, answer: Answer, written: Written, pieces: TextPieces | ChatPieces, watched: Watched
    ) -> Chunks:
        """Yields the answer as chunks, those of a step together."""
        head = answer.head(".chunk" if answer.kind == "chat.completion" else "")
        with watched as step:
            async for updates in written:
                step(updates)
                yield [
                    {**head, "choices": [choice]}
                    for update in updates
                    for choice in pieces.piece(update, number_of(update))
                ]
            yield [{**head, "choices": [], "usage": answer.usage()}]

    @contextmanager
    def _watched(
        self, answer: Answer, pieces: TextPieces | ChatPieces, tenant: str, transcript: Transcript | None
    ) -> Iterator[Callable[[list[Update]], None]]:
        """Times the steps of an answer, of which the block tells; then counts it, and records a `transcript` of it."""
        timing = Timing(self.metrics, answer.model.name)

        def step(updates: list[Update]) -> None:
            timing.token()
            if transcript is not None:
                transcript.add(updates)

        error: BaseException | None = None
        try:
            yield step
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._count(answer)
            if transcript is not None and self.recorder is not None:
                transcript.end(error)
                self.recorder.record(transcript, pieces, tenant)

    def _count(self, answer: Answer) -> None:
        usage = answer.usage()
        self.metrics.prompt_tokens.labels(answer.model.name).inc(usage["prompt_tokens"])
        self.metrics.completion_tokens.labels(answer.model.name).inc(usage["completion_tokens"])
        self.metrics.cached_tokens.labels(answer.model.name).inc(usage["prompt_tokens_details"]["cached_tokens"])
        for request in answer.requests:
            self.metrics.queued.labels(answer.model.name).observe(request.seconds_waited)


class Ticket:
    """A client's request for a model: counts for both until the context ends."""

    def __init__(self, model: ServedModel, tenant: str, stack: ExitStack) -> None:
        self.model, self.tenant, self._stack = model, tenant, stack

    def transfer(self) -> ExitStack:
        """Moves the counts to a stack whose owner ends them; leaving the ticket then does nothing."""
        return self._stack.pop_all()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _EventStream(StreamingResponse):
    """A stream of events that ends its generation and closes `stack` even if it is never read."""

    def __init__(
        self, events: Any, media_type: str, written: Written, stack: ExitStack, headers: dict[str, str]
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache", **headers})
        self._events, self._written, self._stack = events, written, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            async with aclosing(self._written), aclosing(self._events):
                await super().__call__(scope, receive, send)


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
