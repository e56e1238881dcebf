"""Signals that end a run: the first is remembered until the loop reaches a place where it can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sheepop.core.errors import Interrupted


class InterruptFlag:
    """Whether a signal asked the run to end, and which."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def interrupts_advise(what_now: str) -> Iterator[None]:
    """An interrupt within the block says at its end what the user can do now."""
    try:
        yield
    except Interrupted as interrupted:
        raise Interrupted(f"{interrupted} {what_now}", interrupted.exit_code - 128) from None
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {what_now}") from None


@contextmanager
def catch_interrupts() -> Iterator[InterruptFlag]:
    """Within the block SIGINT and SIGTERM set the flag; a second one interrupts at once, as Python does.

    Outside the main thread, where signals cannot be caught, the flag stays unset.
    """
    flag = InterruptFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.signal_number = number

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
