"""Requests that may fail and are tried again: which faults pass by themselves, and how long to wait for them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds before each further attempt. A transfer that got on in between begins anew with the first.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
# A server that asks for a longer wait than this is not waited for.
_LONGEST_WAIT = 120.0
# How long to wait for a connection, and for the next bytes.
TIMEOUT_SECONDS = 30.0
# A connection that gives less than this in `TIMEOUT_SECONDS` has stalled, though it never falls silent.
_LEAST_BYTES = 2**15
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class BrokenOff(Exception):  # noqa: N818 - it is a state of the connection; who gives up on it raises an error
    """An answer ended before it was whole, or hardly gets on."""


def passing_fault(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: no answer, a broken connection, an overloaded server."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, BrokenOff):
        return True
    if isinstance(error, OfflineModeIsEnabled):  # a ConnectionError that stays
        return False
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUS
    return isinstance(error, (client_errors(), ConnectionError, TimeoutError))


def status_of(error: BaseException) -> int | None:
    """The HTTP status that `error` reports, where it reports one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def client_errors() -> type[Exception]:
    """The base class of the errors of the HTTP client that the hub's library uses, whichever that is."""
    from huggingface_hub.errors import HfHubHTTPError

    base = next(kind for kind in HfHubHTTPError.__mro__[1:] if kind.__name__ == "HTTPError")
    assert issubclass(base, Exception)
    return base


class Patience:
    """The attempts left for one piece of work: `wait` before the next one, `renew` when there was progress."""

    def __init__(self, tell: Callable[[str], None] = lambda message: None) -> None:
        self._tell = tell
        self._failures = 0

    def renew(self) -> None:
        """All attempts are left again."""
        self._failures = 0

    def wait(self, error: BaseException) -> None:
        """Waits, or raises `error` when it will not pass or there were too many failures in a row."""
        if not passing_fault(error) or self._failures >= len(WAITS):
            raise error
        seconds = max(WAITS[self._failures], asked_wait(error))
        if seconds > _LONGEST_WAIT:
            raise error
        self._failures += 1
        self._tell(f"trying again in {seconds:.0f} s")
        time.sleep(seconds)


def asked_wait(error: BaseException) -> float:
    """The seconds that a server asks to wait: in Retry-After, or until the window of RateLimit ends (t=...)."""
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    given = re.fullmatch(r"(\d{1,9})", headers.get("Retry-After", ""))
    window = re.search(r"\br=0;\s*t=(\d{1,9})\b", headers.get("RateLimit", ""))
    found = given or window
    return float(found[1]) if found else 0.0


def retried(work: Callable[[], T]) -> T:
    """The result of `work`, tried again while its faults are such that pass."""
    patience = Patience()
    while True:
        try:
            return work()
        except Exception as error:
            patience.wait(error)


def not_stalled(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same chunks; raises `BrokenOff` when too few bytes come, which a time-out between bytes never sees."""
    began, received = time.monotonic(), 0
    for chunk in chunks:
        yield chunk
        received += len(chunk)
        now = time.monotonic()
        if now - began >= TIMEOUT_SECONDS:
            if received < _LEAST_BYTES:
                raise BrokenOff(f"only {received:,} bytes arrived in {now - began:.0f} s")
            began, received = now, 0
