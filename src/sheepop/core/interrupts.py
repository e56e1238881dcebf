"""What a user reads after a signal has ended a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from sheepop.core.errors import ENDINGS, Interrupted


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
