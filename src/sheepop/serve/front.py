"""The front of several replicas: it checks keys and limits, keeps metrics and the access log, and forwards requests."""

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
from sheepop.serve.protocol import MODEL_PATHS, ApiError
from sheepop.serve.registry import Registry, draining
from sheepop.serve.replicas import Replicas
from sheepop.serve.served_model import ServedModel

_FORWARDED = (
    "type", "http_version", "scheme", "method", "path", "raw_path", "query_string", "root_path", "headers", "client",
    "server", "request_name",
)  # fmt: skip


class Front:
    """An ASGI application that forwards each request to the replica that has its prefix cached."""

    def __init__(self, replicas: Replicas, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self._replicas, self._config, self._doorkeeper = replicas, config, doorkeeper
        self._metrics = Metrics(Registry(_no_model, []))
        self._gate = Gate(
            self._answer,
            metrics=self._metrics,
            doorkeeper=doorkeeper,
            model_paths=MODEL_PATHS,
            largest_body=config.max_body_bytes,
        )
        self.is_draining, self.num_open = False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http":
            await self._gate(scope, receive, send)

    def reload(self) -> None:
        """Reloads all models in every replica."""
        self._replicas.reload()

    def close(self) -> None:
        """Closes the models of every replica; open requests end with an error."""
        self._replicas.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        if route == ("GET", "/health"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif route == ("GET", "/metrics"):
            text = merged(self._metrics.text(), await self._replicas.metrics())
            await Response(text, media_type="text/plain; version=0.0.4")(scope, receive, send)
        elif self.is_draining:
            raise draining()
        else:
            self.num_open += 1
            try:
                await self._forward(Request(scope, receive), send)
            finally:
                self.num_open -= 1

    async def _forward(self, request: Request, send: Send) -> None:
        """Lets a replica answer; requests for a model count towards the limits of their client."""
        body = await request.body()
        if request.scope["path"] not in MODEL_PATHS:
            await self._copy("", request, body, send)
            return
        client = self._doorkeeper.client(request.headers.get("authorization"))
        client.enter()
        try:
            await self._copy(beginning(body, client.settings.name), request, body, send)
        finally:
            client.leave()

    async def _copy(self, key: str, request: Request, body: bytes, send: Send) -> None:
        """Sends the answer of the replica; an error in the middle of a stream becomes an event of it."""
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
        forwarded = {name: scope[name] for name in _FORWARDED if name in scope}
        # With this version the application does not listen for disconnects; its task is cancelled instead.
        forwarded["asgi"] = {"version": "3.0", "spec_version": "2.4"}
        head: Message | None = None
        async with aclosing(self._replicas.answer(key, forwarded, body)) as answer:
            async for messages in answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        # Sent with the first body message, so that a replica lost before can still change the status.
                        head = _without_name(message)
                        continue
                    if head is not None:
                        await send(head)
                        head = None
                    await send(message)


def _without_name(head: Message) -> Message:
    """Returns the start of an answer without the request id, which the front's gate adds."""
    return {**head, "headers": [pair for pair in head["headers"] if pair[0] != b"x-request-id"]}


def _no_model(name: str) -> ServedModel:
    raise AssertionError(f"{name}: models are in the replicas")
