"""Access to a server: API keys with their rate limits, and the gate that every request passes."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sheepop.core.config import Config
from sheepop.core.errors import ConfigError
from sheepop.serve.metrics import Metrics
from sheepop.serve.protocol import MODEL_PATHS, ApiError, error_body

_ACCESS, _FAULTS = logging.getLogger("sheepop.access"), logging.getLogger("sheepop.server")
_LONGEST_PATH = 200
_BODIES = 64  # how many bodies of the largest size may be in memory at a time
_MINUTE = 60.0


class KeySettings(Config):
    """A key and its limits: one entry of the file of keys."""

    key: str = Field(min_length=8)
    """The key that a client sends as ``Authorization: Bearer KEY``."""
    name: str
    """The owner of the key; requests of different owners share no cached prefixes."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """The most requests in any minute."""
    concurrent_requests: int | None = Field(default=None, ge=1)
    """The most requests at a time."""


@dataclass
class Client:
    """An owner of a key: the times of its requests in the last minute, and how many of them are open."""

    settings: KeySettings
    times: deque[float] = field(default_factory=deque)
    num_open: int = 0

    def enter(self) -> None:
        """Counts a request; raises `ApiError` 429 if a limit is reached."""
        now, limits = time.monotonic(), self.settings
        while self.times and now - self.times[0] >= _MINUTE:
            self.times.popleft()
        if limits.requests_per_minute is not None and len(self.times) >= limits.requests_per_minute:
            raise _too_many("requests in a minute", 1 + int(_MINUTE - (now - self.times[0])))
        if limits.concurrent_requests is not None and self.num_open >= limits.concurrent_requests:
            raise _too_many("requests at a time", 1)
        self.times.append(now)
        self.num_open += 1

    def leave(self) -> None:
        """Records that a request has ended."""
        self.num_open -= 1


class Doorkeeper:
    """Identifies clients by the keys of a `file` and a `key`; with neither, all are one client without limits."""

    def __init__(self, file: str | None, key: str | None = None) -> None:
        own = [] if key is None else [KeySettings(key=key, name="")]
        self._clients = [Client(settings) for settings in (*own, *(() if file is None else _read(Path(file))))]
        self._anyone = None if self._clients else Client(KeySettings(key="everyone", name=""))

    def client(self, headers: Mapping[str, str]) -> Client:
        """Returns the client that sent a request with these headers; raises `ApiError` 401.

        The key is a bearer token, or as in Anthropic's API in ``x-api-key``. Compares every key in constant time.
        """
        if self._anyone is not None:
            return self._anyone
        found = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        given = found.strip().encode()
        matching = [client for client in self._clients if hmac.compare_digest(client.settings.key.encode(), given)]
        if not matching:
            raise ApiError(401, "The API key is missing or wrong.", kind="authentication_error", code="invalid_api_key")
        return matching[0]

    def without_limits(self) -> Doorkeeper:
        """Returns a copy with the same keys but no limits, for replicas: the front has counted their requests."""
        other = copy(self)
        other._clients = [Client(KeySettings(key=own.settings.key, name=own.settings.name)) for own in self._clients]
        return other


def _too_many(what: str, seconds: int) -> ApiError:
    return ApiError(
        429, f"Too many {what} for this key. Try again in {seconds} s.", kind="rate_limit_error",
        code="rate_limit_exceeded", retry_after=seconds,
    )  # fmt: skip


def _read(file: Path) -> list[KeySettings]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        keys = [KeySettings(**entry) for entry in entries]
    except OSError as error:
        raise ConfigError(f"The file of API keys {file} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, ValidationError) as error:
        raise ConfigError(f"The file of API keys {file} is not a list of objects with key and name: {error}") from None
    if not keys or len({entry.key for entry in keys}) != len(keys):
        raise ConfigError(f"The file of API keys {file} must have at least one key, and each key once.")
    return keys


class Gate:
    """ASGI middleware. Requests for `paths_with_key` need one; the log contains no text of prompts or answers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        doorkeeper: Doorkeeper,
        paths_with_key: Collection[str],
        largest_body: int,
    ) -> None:
        self._app, self._metrics, self._doorkeeper = app, metrics, doorkeeper
        self._paths_with_key, self._largest_body = frozenset(paths_with_key), largest_body
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
                words = "The server has too many large requests. Try again later."
                raise ApiError(503, words, kind="server_error", code="overloaded", retry_after=1)
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
                await _answer(error if isinstance(error, ApiError) else _fault(error, name), scope["path"], watched)
            else:
                _fault(error, name)
        finally:
            self._held -= size
            self._metrics.open.dec()
            self._record(scope, status, time.monotonic() - started, name)

    def _check(self, scope: Scope) -> None:
        """Refuses a request without a valid key or with a large body before the body is read."""
        headers = Headers(scope=scope)
        if scope["path"] in self._paths_with_key:
            self._doorkeeper.client(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._largest_body:
            raise _too_large(self._largest_body)

    def _record(self, scope: Scope, status: int, seconds: float, name: str) -> None:
        # Unknown paths must not create new time series.
        known = scope["path"] if scope["path"] in MODEL_PATHS else "other"
        self._metrics.requests.labels(known, str(status)).inc()
        self._metrics.duration.labels(known).observe(seconds)
        entry = {
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


def _fault(error: Exception, name: str) -> ApiError:
    _FAULTS.error("request %s failed", name, exc_info=error)
    return ApiError(500, f"The server failed; its log says more about request {name}.", kind="server_error")


async def _answer(error: ApiError, path: str, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(error, path)).encode()})
