"""The address of several replicas: counts by key, limits, metrics and the access log are those of one server."""

from __future__ import annotations

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import CLIENT_LEFT, while_wanted
from sheepop.serve.config import ServerConfig
from sheepop.serve.gate import Gate
from sheepop.serve.home import beginning
from sheepop.serve.metrics import Metrics, merged
from sheepop.serve.pieces import event
from sheepop.serve.protocol import ASKING, ApiError
from sheepop.serve.registry import Registry, draining
from sheepop.serve.replicas import Replicas
from sheepop.serve.served_model import ServedModel

_HANDED_ON = (
    "type", "http_version", "scheme", "method", "path", "raw_path", "query_string", "root_path", "headers", "client",
    "server", "request_name",
)  # fmt: skip


class Front:
    """An ASGI application that hands each request to the replica where its beginning is known."""

    def __init__(self, replicas: Replicas, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self._replicas, self._config, self._doorkeeper = replicas, config, doorkeeper
        self._metrics = Metrics(Registry(_no_model, []))
        self._gate = Gate(
            self._answer,
            metrics=self._metrics,
            doorkeeper=doorkeeper,
            asking=ASKING,
            largest_body=config.max_body_bytes,
        )
        self.is_draining, self.num_open = False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http":
            await self._gate(scope, receive, send)

    def reload(self) -> None:
        """Every replica reads all models again."""
        self._replicas.reload()

    def close(self) -> None:
        """Every replica ends its models; who still waits for one is told so."""
        self._replicas.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (scope["method"], scope["path"])
        if asked == ("GET", "/health"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif asked == ("GET", "/metrics"):
            text = merged(self._metrics.text(), await self._replicas.metrics())
            await Response(text, media_type="text/plain; version=0.0.4")(scope, receive, send)
        elif self.is_draining:
            raise draining()
        else:
            self.num_open += 1
            try:
                await self._hand_on(Request(scope, receive), send)
            finally:
                self.num_open -= 1

    async def _hand_on(self, request: Request, send: Send) -> None:
        """Lets a replica answer; requests that a model works for count for their client."""
        body = await request.body()
        if request.scope["path"] not in ASKING:
            await self._copy("", request, body, send)
            return
        client = self._doorkeeper.client(request.headers.get("authorization"))
        client.enter()
        try:
            await self._copy(beginning(body, client.settings.name), request, body, send)
        finally:
            client.leave()

    async def _copy(self, key: str, request: Request, body: bytes, send: Send) -> None:
        """Sends what the replica says; what goes wrong in the middle of a stream is an event in it."""
        streams = False

        async def watched(message: Message) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            await send(message)

        try:
            copying = self._write(key, request.scope, body, watched)
            await while_wanted(request, copying, self._config.deadline_seconds)
        except ApiError as error:
            if not streams:
                raise
            if error.status_code != CLIENT_LEFT:
                await send({"type": "http.response.body", "body": event(error.body).encode()})

    async def _write(self, key: str, scope: Scope, body: bytes, send: Send) -> None:
        handed_on = {name: scope[name] for name in _HANDED_ON if name in scope}
        # The application need not listen for a client that leaves: its task is cancelled.
        handed_on["asgi"] = {"version": "3.0", "spec_version": "2.4"}
        head: Message | None = None
        async with aclosing(self._replicas.answer(key, handed_on, body)) as answer:
            async for messages in answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        # Held back until something follows: the loss of a replica before can still be told by status.
                        head = _without_name(message)
                        continue
                    if head is not None:
                        await send(head)
                        head = None
                    await send(message)


def _without_name(head: Message) -> Message:
    """The start of an answer without the name of the request, which the gate in front adds."""
    return {**head, "headers": [pair for pair in head["headers"] if pair[0] != b"x-request-id"]}


def _no_model(name: str) -> ServedModel:
    raise AssertionError(f"{name}: models are in the replicas")
