"""Named errors: each says what is wrong, where, and what to do, and carries the exit code of its kind.

Exit codes: 1 a fault, 2 wrong usage or configuration, 3 unusable data or model, 130 and 143 after a signal,
141 when nobody reads the results any more.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any


class SheepOpError(Exception):
    """An error the user can act on. The command line prints its message without a traceback."""

    exit_code = 1


class ConfigError(SheepOpError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""

    exit_code = 2


class UsageError(SheepOpError):
    """A command or function was called in a way that cannot be honoured."""

    exit_code = 2


class DeviceError(SheepOpError):
    """A device or precision was asked for that this machine does not have."""

    exit_code = 2


class DataError(SheepOpError):
    """Input files or a corpus directory cannot be used."""

    exit_code = 3


class TokenizerError(SheepOpError):
    """A tokenizer cannot be trained, read, or does not fit what it is used with."""

    exit_code = 3


class CheckpointError(SheepOpError):
    """A model, checkpoint or run directory is missing, damaged, foreign or of a newer format."""

    exit_code = 3


class TrainingError(SheepOpError):
    """Training cannot continue: values became NaN or infinite."""


class RanksError(SheepOpError):
    """Processes of one run lost each other."""


class StorageError(SheepOpError):
    """The file system refused a write: full, read-only, or not permitted."""


class OutputError(StorageError):
    """An output has a name that it cannot have: something else is there, or it is too long."""

    exit_code = 2


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the usual wish to end, and the warning that batch systems send before they take a machine away."""

ENDINGS: dict[object, str] = {
    128 + signal.SIGINT: "Interrupted.",
    128 + signal.SIGTERM: "Terminated.",
    128 + signal.SIGUSR1: "Ended by SIGUSR1.",
}
"""What is said of a command that a signal ended, by its exit code."""


class EndedWithOthers(SystemExit):
    """The end of a process of several of which another one says why."""


class Interrupted(SheepOpError):  # noqa: N818 - it is no fault
    """A signal ended the work after its state was saved; the exit code is 128 plus the signal's number.

    `is_advised` when the message says what the user can do now.
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT, *, is_advised: bool = False) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        self.is_advised = is_advised


def first_few(items: Collection[Any], most: int, *, separator: str = ", ", written: Callable[[Any], str] = str) -> str:
    """The first `most` of `items`, and how many more there are: ``a, b and 5 more``, or ``a; b; and 5 more``."""
    named = separator.join(written(item) for item in islice(items, most))
    beside = len(items) - most
    if beside <= 0:
        return named
    return f"{named}{'' if separator == ', ' else separator.rstrip()} and {beside:,} more"
