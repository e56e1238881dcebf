"""What every request passes: a limit for its body, a line in the access log, counts and times, and faults as errors."""

from __future__ import annotations

import json
import logging
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sheepop.serve.metrics import Metrics
from sheepop.serve.protocol import ApiError

_ACCESS, _FAULTS = logging.getLogger("sheepop.access"), logging.getLogger("sheepop.server")
_COUNTED = ("/v1/", "/tokenize", "/detokenize")


class Gate:
    """ASGI middleware. The log has no text of prompts or answers."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, largest_body: int) -> None:
        self._app, self._metrics, self._largest_body = app, metrics, largest_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, size = time.monotonic(), 0, 0
        name = scope.setdefault("request_name", secrets.token_hex(8))  # a replica finds that of its front

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._largest_body:
                raise _too_large(self._largest_body)
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        self._metrics.open.inc()
        try:
            self._check_length(scope)
            await self._app(scope, limited, watched)
        except Exception as error:
            refusal = error if isinstance(error, ApiError) else _fault(error, name)
            if status == 0:
                await _answer(refusal, watched)
        finally:
            self._metrics.open.dec()
            self._record(scope, status, time.monotonic() - started, name)

    def _check_length(self, scope: Scope) -> None:
        for header, value in scope["headers"]:
            if header == b"content-length" and value.isdigit() and int(value) > self._largest_body:
                raise _too_large(self._largest_body)

    def _record(self, scope: Scope, status: int, seconds: float, name: str) -> None:
        path = scope["path"]
        known = path if path.startswith(_COUNTED) and not path.startswith("/v1/models/") else "other"
        self._metrics.requests.labels(known, str(status)).inc()
        self._metrics.duration.labels(known).observe(seconds)
        entry: dict[str, Any] = {
            "request": name,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
        }
        _ACCESS.info(json.dumps(entry))


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body of the request is larger than {most:,} bytes.", code="request_too_large")


def _fault(error: Exception, name: str) -> ApiError:
    _FAULTS.error("request %s failed", name, exc_info=error)
    return ApiError(500, f"The server failed; its log says more about request {name}.", kind="server_error")


async def _answer(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})
