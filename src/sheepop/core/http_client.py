"""An HTTP client for services that speak JSON: retries, limits of time and size, and errors that name the address."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from time import monotonic, sleep
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from sheepop.core.errors import DataError, UsageError

T = TypeVar("T")
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_MOST_BYTES, _READ_BYTES = 2**24, 2**16
_MOST_CHARACTERS = 500  # of a server's error message
_TRANSIENT = frozenset({408, 425, 429})  # and all statuses from 500
_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
LATER = "Try again later, or with fewer requests at a time."
_RUNNING = "Check that it runs, and that the address is right."
_SLOW = "Give it more time, or fewer requests at a time."
_SHORTER = "The server does not accept such a request; a shorter one may work."


class RefusedError(DataError):
    """A server refused one request, for example because it was too long; it may answer others."""


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818 - one attempt is not the whole request
    """One failed attempt, with a remedy. If it `passes`, another attempt may help, after `wait` seconds if given."""

    what: str
    remedy: str
    passes: bool = True
    wait: float | None = None
    kind: type[DataError] = DataError


class HttpClient:
    """Sends requests to the service at `url` and reads JSON objects.

    A reply may take `timeout` seconds, a streamed reply that long for each line. A request is repeated, up to
    `attempts` times in all, if it finds no connection, times out, gets a reply that breaks off or is not a JSON object,
    or gets status 408, 425, 429 or 5xx. The waits between are 1, 2, 4 ... seconds, at most 60, or what ``Retry-After``
    says. Redirections are not followed, because headers may have a key for this server alone. `expected` tells the user
    which kind of service the address should have, `remedies` what to do about a status. Safe to share between threads.

    Raises `UsageError` for an invalid address, and `DataError` with the address if the last attempt fails or no other
    may help; `RefusedError` is one of these.
    """

    def __init__(
        self,
        url: str,
        *,
        expected: str,
        remedies: Mapping[int, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
    ) -> None:
        if not _is_address(url):
            raise UsageError(f"{url!r} is no address of a server. Give one such as http://localhost:8000.")
        self._url, self._expected, self._remedies = url, expected, dict(remedies or {})
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout, self._attempts = timeout, attempts
        self._opener = urllib.request.build_opener(_NoRedirection)

    def request(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[dict[str, Any]], T],
        *,
        timeout: float | None = None,
        attempts: int | None = None,
    ) -> T:
        """Sends a request, POST if there is a `body`, else GET, and returns ``read(reply)``.

        `path` is appended to the address. `read` raises `Failure` for a reply of the wrong format.
        """
        limit = self._timeout if timeout is None else timeout
        return self._retried(lambda: read(self._object(path, body, limit)), attempts or self._attempts)

    def stream(self, path: str, body: Mapping[str, Any], read: Callable[[Iterator[bytes]], Iterator[T]]) -> Iterator[T]:
        """Yields from ``read(lines)`` while the reply arrives; once it has begun, there is no other attempt."""
        with self._retried(lambda: self._open(path, body, self._timeout), self._attempts) as reply:
            try:
                yield from read(_lines(reply))
            except (Failure, OSError, HTTPException) as error:
                raise self._error(error if isinstance(error, Failure) else _connection_failure(error), 1) from None

    def decoded(self, data: bytes) -> dict[str, Any]:
        """A JSON object; raises `Failure` for anything else, and for an object that reports an error."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Failure("did not answer with a JSON object", self._expected)
        if found.get("error"):
            message = _message(data.decode("utf-8", errors="replace"))
            raise Failure(f"answered with an error: {message.rstrip('.')}", LATER)
        return found

    def _retried(self, attempt: Callable[[], T], attempts: int) -> T:
        number = 0
        while True:
            number += 1
            try:
                return attempt()
            except Failure as failure:
                wait = min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) if failure.wait is None else failure.wait
                if not failure.passes or number >= attempts or wait > _LONGEST_WAIT:
                    raise self._error(failure, number) from None
            sleep(wait)

    def _error(self, failure: Failure, number: int) -> DataError:
        attempts = f" ({number} attempts)" if number > 1 else ""
        later = "" if failure.wait is None or failure.wait <= _LONGEST_WAIT else f" It asks for {failure.wait:,.0f} s."
        return failure.kind(f"{self._url} {failure.what}{attempts}.{later} {failure.remedy}")

    def _object(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        begun, data = monotonic(), bytearray()
        with self._open(path, body, timeout) as reply:
            length = reply.length
            try:
                while length is None or len(data) < length:
                    # A server that sends a byte now and then never exceeds the timeout of a single read.
                    if monotonic() - begun > timeout:
                        raise Failure(f"did not finish its answer within {timeout:g} s", _SLOW)
                    piece = reply.read1(_READ_BYTES)
                    data += piece
                    if len(data) > _MOST_BYTES:
                        raise _too_large()
                    if not piece:
                        break
            except (OSError, HTTPException) as error:
                raise _connection_failure(error) from None
        if length is not None and len(data) < length:
            raise Failure("broke off its answer", LATER)
        return self.decoded(bytes(data))

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, HTTPException, ValueError) as error:
            raise _connection_failure(error) from None

    def _refusal(self, error: urllib.error.HTTPError) -> Failure:
        """The failure of a request that was answered with an error status."""
        with error:
            try:
                message = _message(error.read(_READ_BYTES).decode("utf-8", errors="replace"))
            except (OSError, HTTPException):
                message = "nothing"
        passes = error.code in _TRANSIENT or error.code >= 500
        is_refused = error.code in _ABOUT_THE_REQUEST
        after = (error.headers.get("Retry-After") or "").strip()
        return Failure(
            f"answered {error.code}: {message.rstrip('.')}",
            self._remedies.get(error.code, LATER if passes else _SHORTER if is_refused else _RUNNING),
            passes=passes,
            wait=float(after) if after.isascii() and after.isdecimal() else None,
            kind=RefusedError if is_refused else DataError,
        )


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Treats a redirection as an error status."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Returns no further request."""


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not set(url) & set(" #@")
            and url.isprintable()
        )
    except ValueError:
        return False


def _connection_failure(error: Exception) -> Failure:
    """The failure of a connection, or of a reply that had begun."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return Failure("does not answer in time", _SLOW)
    words = getattr(reason, "strerror", None) or reason
    if isinstance(error, urllib.error.URLError | ValueError):
        return Failure(f"cannot be reached: {words}", _RUNNING, passes=not isinstance(error, ValueError))
    return Failure(f"broke off its answer: {words}", LATER)


def _message(reply: str) -> str:
    """The message of an error in OpenAI's format; the reply itself in any other format."""
    try:
        words = str(json.loads(reply)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        words = reply
    return words.strip()[:_MOST_CHARACTERS] or "nothing"


def _lines(reply: HTTPResponse) -> Iterator[bytes]:
    size = 0
    while line := reply.readline(_MOST_BYTES):
        size += len(line)
        if size > _MOST_BYTES:
            raise _too_large()
        yield line


def _too_large() -> Failure:
    return Failure(f"answers with more than {_MOST_BYTES // 2**20} MiB", "Ask for less at a time.", passes=False)
