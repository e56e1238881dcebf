"""The course of a run as data: ``metrics.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError
from sheepop.core.files import finite, storage_errors, sync_directory
from sheepop.core.json_lines import BadLine, parsed_lines

SCORE = "score"
"""The `split` of the last row of a finished run: its best checkpoint on the whole held-out text."""
EVALUATION = "evaluation"
"""The `split` of rows with what evaluations found while a run trained."""
VERIFICATION = "verification"
"""The `split` of rows that tell of silent corruption."""


class JsonLines:
    """An append-only file of JSON objects whose length is part of every checkpoint.

    On resume the file is cut back to the length the checkpoint recorded, so that no line is repeated or missing.
    The rows of `VERIFICATION` stay: that a machine computed wrongly, the steps taken anew may not say again. `kept`
    are the rows that stayed at the last cut.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self.kept: list[dict[str, Any]] = []
        with storage_errors(path):
            # Unbuffered: what a full disk refused would be tried again, and refused again, when the file is closed.
            self._file = path.open("ab", buffering=0)
            size = path.stat().st_size
            if size < length:
                self._file.close()
                raise CheckpointError(
                    f"{path} has {size} bytes, but the checkpoint was written when it had {length}. "
                    "Restore the file, or start a new run."
                )
            # A checkpoint counts on the file being there; what is synced later is its content alone.
            sync_directory(path.parent)
        self.cut(length, lambda row: row.get("split") == VERIFICATION)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one object; numbers that are not finite become null, which JSON can hold."""
        with storage_errors(self.path):
            rest = json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
            while rest:  # a disk that is almost full takes a part
                rest = rest[self._file.write(rest) :]

    @property
    def length(self) -> int:
        """The length in bytes."""
        return self._file.tell()

    def sync(self) -> None:
        """Waits until what was appended is on the disk; another thread may do so."""
        with storage_errors(self.path):
            os.fsync(self._file.fileno())

    def cut(self, length: int, keep: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
        """Removes the rows that were appended after the file had `length` bytes, but for those to `keep`."""
        with storage_errors(self.path):
            with self.path.open("rb") as file:
                file.seek(length)
                rows, _ = _rows(file.read())
            self._file.truncate(length)
            # Cutting leaves the position where it was, and `length` and `sync` go by it.
            self._file.seek(length)
        self.kept = [row for row in rows if keep(row)]
        for row in self.kept:
            self.append(row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class NoLines(JsonLines):
    """What ranks other than the first keep of their rows: nothing."""

    def __init__(self) -> None:
        self.kept = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Forgets it."""

    @property
    def length(self) -> int:
        """None at all."""
        return 0

    def sync(self) -> None:
        """Nothing waits."""

    def cut(self, length: int, keep: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing is open."""


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSON-lines file, and how many of its lines hold none, such as a last line cut by a kill.

    An absent file has no rows.
    """
    return _rows(path.read_bytes() if path.is_file() else b"")


def _rows(text: bytes) -> tuple[list[dict[str, Any]], int]:
    lines = [line for _, line in parsed_lines(text.split(b"\n"))]
    rows = [line for line in lines if not isinstance(line, BadLine)]
    return rows, len(lines) - len(rows)
