"""API keys and their rate limits."""

from __future__ import annotations

import hmac
import json
import time
from collections import deque
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from sheepop.core.config import Config
from sheepop.core.errors import ConfigError
from sheepop.serve.protocol import ApiError

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
    """Identifies clients by their keys; without a file of keys, everyone is the same client without limits."""

    def __init__(self, file: str | None) -> None:
        self._clients = [Client(settings) for settings in _read(Path(file))] if file is not None else []
        self._anyone = Client(KeySettings(key="everyone", name="")) if file is None else None

    def client(self, authorization: str | None) -> Client:
        """Returns the client that sent a request; raises `ApiError` 401. Compares every key in constant time."""
        if self._anyone is not None:
            return self._anyone
        given = (authorization or "").removeprefix("Bearer ").strip().encode()
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
