"""The middleware of every request: key, body size, access log, metrics, and faults as API errors."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sheepop.serve.access import Doorkeeper
from sheepop.serve.metrics import Metrics
from sheepop.serve.protocol import ApiError

_ACCESS, _FAULTS = logging.getLogger("sheepop.access"), logging.getLogger("sheepop.server")
_LONGEST_PATH = 200
_BODIES = 64  # how many bodies of the largest size may be in memory at a time


class Gate:
    """ASGI middleware. Requests for `model_paths` need a key; the log contains no text of prompts or answers."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, doorkeeper: Doorkeeper, model_paths: Collection[str], largest_body: int
    ) -> None:
        self._app, self._metrics, self._doorkeeper = app, metrics, doorkeeper
        self._model_paths, self._largest_body = frozenset(model_paths), largest_body
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, size = time.monotonic(), 0, 0
        name = scope.setdefault("request_name", secrets.token_hex(8))  # the front sets it for a replica

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            count = len(message.get("body", b""))
            size, self._held = size + count, self._held + count
            if size > self._largest_body:
                raise _too_large(self._largest_body)
            if self._held > _BODIES * self._largest_body:
                raise _too_many()
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        self._metrics.open.inc()
        try:
            self._check(scope)
            await self._app(scope, limited, watched)
        except Exception as error:
            if status == 0:
                await _answer(error if isinstance(error, ApiError) else _fault(error, name), watched)
            else:
                _fault(error, name)
        finally:
            self._held -= size
            self._metrics.open.dec()
            self._record(scope, status, time.monotonic() - started, name)

    def _check(self, scope: Scope) -> None:
        """Refuses a request without a valid key or with a large body before the body is read."""
        headers = dict(scope["headers"])
        if scope["path"] in self._model_paths:
            self._doorkeeper.client(headers.get(b"authorization", b"").decode("latin-1"))
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._largest_body:
            raise _too_large(self._largest_body)

    def _record(self, scope: Scope, status: int, seconds: float, name: str) -> None:
        # Unknown paths must not create new time series.
        known = scope["path"] if scope["path"] in self._model_paths else "other"
        self._metrics.requests.labels(known, str(status)).inc()
        self._metrics.duration.labels(known).observe(seconds)
        entry: dict[str, Any] = {
            "request": name,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"][:_LONGEST_PATH],
            "status": status,
            "seconds": round(seconds, 4),
        }
        _ACCESS.info(json.dumps(entry))


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body of the request is larger than {most:,} bytes.", code="request_too_large")


def _too_many() -> ApiError:
    message = "The server has too many large requests. Try again later."
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after=1)


def _fault(error: Exception, name: str) -> ApiError:
    _FAULTS.error("request %s failed", name, exc_info=error)
    return ApiError(500, f"The server failed; its log says more about request {name}.", kind="server_error")


async def _answer(error: ApiError, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})
