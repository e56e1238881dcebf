"""The ``sheepop`` command, also ``python -m sheepop``; a signal never produces a traceback, even at the start."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from sheepop.core.errors import ENDING_SIGNALS, ENDINGS


def main() -> None:
    """Runs the command line; the entry point of the installed program."""
    # A signal that the process ignores from its start stays ignored.
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _end)
    from sheepop.cli.main import main as run_command_line

    # The command line handles signals itself while it runs a command; until it has said why that ended, they wait.
    for number in handled:
        signal.signal(number, _wait)
    code = 0
    try:
        run_command_line()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    for number in handled:
        signal.signal(number, lambda *_: os._exit(code))
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process as Python does, but without taking all libraries apart, which takes half a second after torch.

    Python itself ends it if a stream fails, which it reports, or if a profiler waits for the end.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        if sys.getprofile() is None and sys.gettrace() is None:
            os._exit(code)
    sys.exit(code)


def _wait(number: int, frame: FrameType | None) -> None:
    """Does nothing: the process is ending anyway."""


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process at once while it still loads the command line.

    There is nothing to clean up yet, and a half-loaded library would report an exception as its own error.
    """
    os.write(2, f"{ENDINGS[128 + number]}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
