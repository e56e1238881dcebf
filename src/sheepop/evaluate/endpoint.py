"""A client of servers that speak OpenAI's protocol, patient with those that are slow, busy or broken."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPMessage, HTTPResponse
from time import monotonic, sleep
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from sheepop.core.errors import DataError, UsageError

T = TypeVar("T")
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_MOST_BYTES, _MOST_AT_ONCE = 2**24, 2**16
_MOST_WORDS = 500
_PASSING = frozenset({408, 425, 429})  # and all from 500 on
_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
_REMEDIES = {
    401: "Give a key with --api-key, or in OPENAI_API_KEY.",
    403: "Give a key that may use this model, with --api-key or in OPENAI_API_KEY.",
    404: "Check the address, and the model's name.",
    **dict.fromkeys(_ABOUT_THE_REQUEST, "The server takes no such request; a shorter one may do."),
}
_LATER = "Try again later, or with fewer requests at a time."
_RUNNING = "Check that it runs, and that the address is right."
_SLOW = "Give it more time, or fewer requests at a time."
_OTHER = "Give the address of a server that speaks OpenAI's protocol."


class RefusedError(DataError):
    """A server refuses this request, perhaps because it is too long; it may well answer others."""


class Piece(NamedTuple):
    """A piece of an answer as it is written; the last one has a reason why it ends, such as ``stop`` or ``length``."""

    text: str
    finish_reason: str | None


class Endpoint:
    """A model behind ``/v1/chat/completions`` below `url`; the server's first one when `model` is None.

    `settings` go with every request, such as ``temperature``. An answer has `timeout` seconds to come, and a streamed
    one each of its pieces. Where another attempt may help (no connection, a timeout, an answer that breaks off or is
    none, the status 408, 425, 429 or one from 500 on) there are up to `attempts`, with waits of 1, 2, 4 ... seconds, at
    most 60, between them, or as long as ``Retry-After`` says. Redirections are not followed: the key is for this server
    alone. Safe to share between threads.

    Raises `DataError` with the address when all attempts failed or none may help, among them `RefusedError`, and
    `UsageError` for an address or a key that cannot be one.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _require_address(url)
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise UsageError("The API key holds a line break or a letter that is not ASCII. Copy it again.")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout, self._attempts, self._settings = timeout, attempts, dict(settings or {})
        self._opener = urllib.request.build_opener(_StayHere)
        self.model = model or self._first_model()

    def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The whole answer to a conversation; `settings` are more fields of the request."""
        asked = {"model": self.model, "messages": list(messages), **self._settings, **settings}
        return self._patiently(lambda: _content(self._read("/chat/completions", asked)))

    def stream(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Iterator[Piece]:
        """The answer piece by piece. Once it has begun there is no other attempt."""
        asked = {"model": self.model, "messages": list(messages), **self._settings, **settings, "stream": True}
        with self._patiently(lambda: self._open("/chat/completions", asked)) as answer:
            try:
                yield from _pieces(answer)
            except (_Failure, OSError, HTTPException) as error:
                raise self._told(error if isinstance(error, _Failure) else _broken(error), 1) from None

    def _first_model(self) -> str:
        def find() -> str:
            try:
                return str(self._read("/models", None)["data"][0]["id"])
            except IndexError:
                raise _Failure("serves no model", "Start it with one.", passes=False) from None
            except (KeyError, TypeError):
                raise _Failure("does not list its models", _OTHER) from None

        return self._patiently(find)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        number = 0
        while True:
            number += 1
            try:
                return attempt()
            except _Failure as failure:
                wait = min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) if failure.wait is None else failure.wait
                if not failure.passes or number >= self._attempts or wait > _LONGEST_WAIT:
                    raise self._told(failure, number) from None
            sleep(wait)

    def _told(self, failure: _Failure, number: int) -> DataError:
        asked_often = f" ({number} attempts)" if number > 1 else ""
        later = "" if failure.wait is None or failure.wait <= _LONGEST_WAIT else f" It asks for {failure.wait:,.0f} s."
        return failure.kind(f"{self.url} {failure.what}{asked_often}.{later} {failure.remedy}")

    def _read(self, place: str, asked: Mapping[str, Any] | None) -> Any:
        """The JSON of a whole answer."""
        begun, data = monotonic(), bytearray()
        with self._open(place, asked) as answer:
            length = answer.length
            try:
                while length is None or len(data) < length:
                    # A server that sends a byte now and then would never exceed the limit of a single read.
                    if monotonic() - begun > self._timeout:
                        raise _Failure(f"did not finish its answer within {self._timeout:g} s", _SLOW)
                    piece = answer.read1(_MOST_AT_ONCE)
                    data += piece
                    if len(data) > _MOST_BYTES:
                        raise _too_large()
                    if not piece:
                        break
            except (OSError, HTTPException) as error:
                raise _broken(error) from None
        if length is not None and len(data) < length:
            raise _Failure("broke off its answer", _LATER)
        return _json(bytes(data))

    def _open(self, place: str, asked: Mapping[str, Any] | None) -> HTTPResponse:
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(self.url + place, data=data, headers=self._headers)
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise _refusal(error) from None
        except (OSError, HTTPException, ValueError) as error:
            raise _broken(error) from None


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Takes a redirection for the error that it then is."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """There is no other request."""


class _Failure(Exception):  # noqa: N818 - one attempt is not the whole request
    """What happened to an attempt, and what to do; another may help if it `passes`, after `wait` seconds if given."""

    def __init__(
        self,
        what: str,
        remedy: str,
        *,
        passes: bool = True,
        wait: float | None = None,
        kind: type[DataError] = DataError,
    ) -> None:
        super().__init__(what)
        self.what, self.remedy, self.passes, self.wait, self.kind = what, remedy, passes, wait, kind


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or not url.isprintable() or set(url) & set(" ?#@"):
        raise UsageError(f"{url!r} is no address of a server. Give one such as http://localhost:8000.")


def _broken(error: Exception) -> _Failure:
    """The failure of a connection, or of an answer that had begun."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return _Failure("does not answer in time", _SLOW)
    words = getattr(reason, "strerror", None) or reason
    if isinstance(error, urllib.error.URLError | ValueError):
        return _Failure(f"cannot be reached: {words}", _RUNNING, passes=not isinstance(error, ValueError))
    return _Failure(f"broke off its answer: {words}", _LATER)


def _refusal(error: urllib.error.HTTPError) -> _Failure:
    """The failure of a request that was answered with a status of its own."""
    with error:
        try:
            words = _reason(error.read(_MOST_AT_ONCE).decode("utf-8", errors="replace"))
        except (OSError, HTTPException):
            words = "nothing"
    passes = error.code in _PASSING or error.code >= 500
    after = (error.headers.get("Retry-After") or "").strip()
    return _Failure(
        f"answered {error.code}: {words.rstrip('.')}",
        _REMEDIES.get(error.code, _LATER if passes else _RUNNING),
        passes=passes,
        wait=float(after) if after.isascii() and after.isdecimal() else None,
        kind=RefusedError if error.code in _ABOUT_THE_REQUEST else DataError,
    )


def _reason(answer: str) -> str:
    """What an answer in the shape of OpenAI's errors says; the answer itself where it has another shape."""
    try:
        words = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        words = answer
    return words.strip()[:_MOST_WORDS] or "nothing"


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _Failure("did not answer with a JSON object", _OTHER)
    if found.get("error"):
        words = _reason(data.decode("utf-8", errors="replace"))
        raise _Failure(f"answered with an error: {words.rstrip('.')}", _LATER)
    return found


def _content(found: dict[str, Any]) -> str:
    """The text of an answer, which is empty where a model was cut off before it said anything."""
    try:
        return _text(found["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise _not_the_protocol() from None


def _pieces(answer: HTTPResponse) -> Iterator[Piece]:
    """What the server-sent events of an answer say."""
    size, is_finished = 0, False
    while line := answer.readline(_MOST_BYTES):
        size += len(line)
        if size > _MOST_BYTES:
            raise _too_large()
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        try:
            for choice in _json(data).get("choices") or ():
                reason = choice.get("finish_reason")
                is_finished = is_finished or reason is not None
                yield Piece(_text((choice.get("delta") or {}).get("content")), reason)
        except (AttributeError, TypeError):
            raise _not_the_protocol() from None
    if not is_finished:
        raise _Failure("broke off its answer", _LATER)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if not isinstance(content, str) or any("\ud800" <= letter <= "\udfff" for letter in content):
        raise _not_the_protocol()
    return content


def _not_the_protocol() -> _Failure:
    return _Failure("answers in another shape than OpenAI's protocol has", _OTHER)


def _too_large() -> _Failure:
    return _Failure(f"answers with more than {_MOST_BYTES // 2**20} MiB", "Ask for fewer tokens.", passes=False)
