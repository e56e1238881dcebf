"""The errors of the project: each says what is wrong, where, and what to do, and has the exit code of its kind.

Exit codes: 1 a fault, 2 wrong usage or configuration, 3 unusable data or model, 130 and 143 after a signal, 141 if the
reader of the results has closed the pipe.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any


class SheepOpError(Exception):
    """An error the user can act on. The command line prints its message without a traceback."""

    exit_code = 1

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code


class ConfigError(SheepOpError, ValueError, exit_code=2):
    """A setting is unknown, out of range, or contradicts another."""


class UsageError(SheepOpError, exit_code=2):
    """A command or function was called in a way that cannot be honoured."""


class PromptTooLongError(UsageError):
    """A prompt leaves no room for a new token in the context."""


class DeviceError(SheepOpError, exit_code=2):
    """This machine does not have the requested device or precision."""


class DataError(SheepOpError, exit_code=3):
    """Input files or a corpus directory cannot be used."""


class TokenizerError(SheepOpError, exit_code=3):
    """A tokenizer cannot be trained or read, or does not match the model or data."""


class CheckpointError(SheepOpError, exit_code=3):
    """A model, checkpoint or run directory is missing, damaged, of another kind or of a newer format."""


class TrainingError(SheepOpError):
    """Training cannot continue: values became NaN or infinite."""


class RanksError(SheepOpError):
    """The processes of a run lost contact."""


class StorageError(SheepOpError):
    """The file system refused a write: full, read-only, or not permitted."""


class OutputError(StorageError, exit_code=2):
    """The path of an output cannot be used: something else is there, or the name is too long."""


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a command: Ctrl-C, the usual request to end, and the warning of batch systems before a job ends."""

ENDINGS: dict[object, str] = {
    128 + signal.SIGINT: "Interrupted.",
    128 + signal.SIGTERM: "Terminated.",
    128 + signal.SIGUSR1: "Ended by SIGUSR1.",
}
"""The message for a command that a signal ended, by exit code."""


class EndedWithOthers(SystemExit):
    """Ends one of several processes; another of them reports the reason."""


class Interrupted(SheepOpError):  # noqa: N818 - it is no fault
    """A signal ended the work after its state was saved; the exit code is 128 plus the signal's number.

    `is_advised` says that the message already tells the user what to do next.
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT, *, is_advised: bool = False) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        self.is_advised = is_advised


def first_few(items: Collection[Any], most: int, *, separator: str = ", ", written: Callable[[Any], str] = str) -> str:
    """Lists the first `most` items and the number of others: ``a, b and 5 more``, or ``a; b; and 5 more``."""
    named = separator.join(written(item) for item in islice(items, most))
    others = len(items) - most
    if others <= 0:
        return named
    return f"{named}{'' if separator == ', ' else separator.rstrip()} and {others:,} more"
