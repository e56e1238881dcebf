"""Handles failed writes to standard output and standard error: a closed pipe, or a file on a full disk."""

from __future__ import annotations

import os
import signal
from typing import Any, TextIO

from sheepop.core.errors import StorageError


class _Stream:
    """A text stream that redirects itself to the null device after a failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # The text left in the buffer would fail again when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class ResultStream(_Stream):
    """The stream for results: without a reader the process ends quietly, as after SIGPIPE; a full disk is an error."""

    def _give_up(self, error: OSError) -> None:
        super()._give_up(error)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE)
        raise StorageError(
            f"Cannot write to standard output: {error.strerror}. Send it to a disk with free space, or to a terminal."
        ) from error


class MessageStream(_Stream):
    """The stream for messages and progress: work continues if its reader is gone."""
