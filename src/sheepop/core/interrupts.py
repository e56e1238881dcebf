"""Handles signals that end a command, and adds advice for the user to the final message.

Work that can be repeated is stopped at once; other work is finished first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sheepop.core.errors import ENDING_SIGNALS, ENDINGS, Interrupted


class StopRequestedError(BaseException):
    """Leaves an `Interruption.leaving` block. It is not an Exception, so that no library catches it."""


class Interruption:
    """Records whether a signal requested the end of the run, and which one."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._may_leave = self._is_expected = False

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Lets a signal end the block at once with `StopRequestedError`; leaving it half done must be harmless.

        A run thus ends soon even if compiling, a validation or waiting for data takes long.
        """
        self._may_leave = True
        try:
            if self:
                raise StopRequestedError
            yield
        finally:
            self._may_leave = False

    def told(self, number: int) -> None:
        """Records a signal that another process of the run received; this process may still receive it too."""
        if not self:
            self.signal_number, self._is_expected = number, True

    def arrived(self, number: int, frame: FrameType | None = None) -> None:
        """Records the first signal. Ctrl-C after it raises KeyboardInterrupt, as Python does.

        Other later signals are ignored: batch systems send several, and the run is already saving.
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
    """Within the block, records SIGINT, SIGTERM and SIGUSR1 in an `Interruption` instead of ending the process.

    Outside the main thread signals cannot be caught, so it never records one there.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    previous = {number: signal.signal(number, interruption.arrived) for number in ENDING_SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_advise(what_now: str) -> Iterator[None]:
    """Adds to the message of an interrupt in the block what the user can do now; the innermost block decides."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.is_advised:
            raise
        raise Interrupted(f"{interrupted} {what_now}", interrupted.exit_code - 128, is_advised=True) from None
    except KeyboardInterrupt:
        raise Interrupted(f"{ENDINGS[128 + signal.SIGINT]} {what_now}", is_advised=True) from None
    except SystemExit as end:
        # The command line raises SystemExit for a signal outside `catch_interrupts`.
        if isinstance(end.code, int) and end.code in ENDINGS:
            raise Interrupted(f"{ENDINGS[end.code]} {what_now}", end.code - 128, is_advised=True) from None
        raise
