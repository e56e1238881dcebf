"""The front of several replicas: it checks keys and limits, keeps metrics and the access log, and forwards requests."""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sheepop.serve.access import Doorkeeper, Gate
from sheepop.serve.answering import while_wanted
from sheepop.serve.answers import event
from sheepop.serve.bodies import CLIENT_LEFT
from sheepop.serve.config import ServerConfig
from sheepop.serve.metrics import Metrics, merged
from sheepop.serve.protocol import MODEL_PATHS, ApiError, draining
from sheepop.serve.replicas import Replicas

_FORWARDED = (
    "type", "http_version", "scheme", "method", "path", "raw_path", "query_string", "root_path", "headers", "client",
    "server", "request_name",
)  # fmt: skip
_CHARACTERS, _TOKENS = 256, 64  # the most that a key is made of


class Front:
    """An ASGI application that forwards each request to the replica that has its prefix cached."""

    def __init__(self, replicas: Replicas, config: ServerConfig, doorkeeper: Doorkeeper) -> None:
        self._replicas, self._config, self._doorkeeper = replicas, config, doorkeeper
        self._metrics = Metrics(tuple)  # the models are in the replicas
        self._gate = Gate(
            self._answer,
            metrics=self._metrics,
            doorkeeper=doorkeeper,
            paths_with_key=(*MODEL_PATHS, *(("/metrics", "/openapi.json") if config.protect_metrics else ())),
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
        client = self._doorkeeper.client(request.headers)
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
                        # The front's gate adds the request id.
                        headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                        head = {**message, "headers": headers}
                        continue
                    if head is not None:
                        await send(head)
                        head = None
                    await send(message)


def beginning(body: bytes, tenant: str) -> str:
    """Returns a hash of a request's prefix, equal for requests that should share a replica; empty without a prefix.

    It covers the tenant, the model, and a conversation up to the user's first message, the first 256 characters of a
    text, or its first 64 tokens.
    """
    try:
        requested = from_json(body)
    except ValueError:
        return ""  # the replica reports the error
    start = _start(requested) if isinstance(requested, dict) else None
    if not start:
        return ""
    return hashlib.blake2b(repr((tenant, requested.get("model"), start)).encode(), digest_size=16).hexdigest()


def _start(requested: dict[str, Any]) -> Any:
    messages, prompt = requested.get("messages"), requested.get("prompt")
    if isinstance(messages, list):
        of_user = (
            n for n, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"
        )
        return messages[: next(of_user, 0) + 1]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:_CHARACTERS]
    return prompt[:_TOKENS] if isinstance(prompt, list) else None
