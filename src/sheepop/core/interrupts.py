"""Signals that end a command: caught while its work is brought to an end, and what the user reads after.

Work that can be done again is left at once, work that cannot is finished first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sheepop.core.errors import ENDING_SIGNALS, ENDINGS, Interrupted


class StopRequestedError(BaseException):
    """Leaves the work of an `Interruption.leaving` block. No Exception, so that no library takes it for its own."""


class Interruption:
    """Whether a signal asked the run to end, and which."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._may_leave = self._is_expected = False

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Work that a signal ends at once, by raising `StopRequestedError`; it must be harmless to leave it half done.

        That bounds the time to the end of the run, however long compiling, a validation or a wait for data takes.
        """
        self._may_leave = True
        try:
            if self:
                raise StopRequestedError
            yield
        finally:
            self._may_leave = False

    def told(self, number: int) -> None:
        """Takes note of a signal that another process of the same run was sent, and that may still come here."""
        if not self:
            self.signal_number, self._is_expected = number, True

    def arrived(self, number: int) -> None:
        """Takes note of the first signal. Ctrl-C after it interrupts wherever the run is, as Python does.

        Of another nothing more comes: batch systems send several, and everything is being saved.
        """
        if self._is_expected:
            self._is_expected = False
            return
        if self:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal_number = number
        if self._may_leave:
            raise StopRequestedError


@contextmanager
def catch_interrupts() -> Iterator[Interruption]:
    """Within the block SIGINT, SIGTERM and SIGUSR1 are told to an `Interruption` instead of ending the process.

    Outside the main thread, where signals cannot be caught, none ever arrives.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interruption.arrived(number)

    previous = {number: signal.signal(number, handle) for number in ENDING_SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_advise(what_now: str) -> Iterator[None]:
    """An interrupt within the block says at its end what the user can do now; the innermost such block does."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.is_advised:
            raise
        raise Interrupted(f"{interrupted} {what_now}", interrupted.exit_code - 128, is_advised=True) from None
    except KeyboardInterrupt:
        raise Interrupted(f"{ENDINGS[128 + signal.SIGINT]} {what_now}", is_advised=True) from None
    except SystemExit as end:
        # So a command unwinds after a signal that nobody caught.
        if isinstance(end.code, int) and end.code in ENDINGS:
            raise Interrupted(f"{ENDINGS[end.code]} {what_now}", end.code - 128, is_advised=True) from None
        raise
