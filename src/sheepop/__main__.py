"""The ``sheepop`` command, which ``python -m sheepop`` is too: quiet about a signal from its first moment on."""

from __future__ import annotations

import os
import signal
from types import FrameType

from sheepop.core.errors import ENDING_SIGNALS, ENDINGS


def main() -> None:
    """Runs the command line of this process; the entry point of the installed program."""
    previous = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    # A signal that the process was started to ignore stays ignored.
    waited_for = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in waited_for:
        signal.signal(number, _end)
    from sheepop.cli.main import main as run_command_line

    for number, handler in waited_for.items():
        signal.signal(number, handler)
    run_command_line()


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process while it still loads the command line.

    At once, as nothing is to be undone yet, and a library that is loaded half takes an exception for its own fault.
    """
    os.write(2, f"{ENDINGS[128 + number]}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
