"""The log files of a run, such as ``metrics.jsonl``: one JSON object per line."""

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
"""The `split` of rows with the scores of evaluations during training."""
VERIFICATION = "verification"
"""The `split` of rows that report silent corruption."""


class JsonLines:
    """An append-only file of JSON objects whose length is part of every checkpoint.

    On resume the file is cut to the length in the checkpoint, so that no line is repeated or missing. Only the rows of
    `VERIFICATION` stay, because a repeated step may not show the same error of the machine again. `kept` are the rows
    that stayed at the last cut.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self.kept: list[dict[str, Any]] = []
        with storage_errors(path):
            # Unbuffered: a buffer that a full disk refused would be written, and refused, again at closing.
            self._file = path.open("ab", buffering=0)
            size = path.stat().st_size
            if size < length:
                self._file.close()
                raise CheckpointError(
                    f"{path} has {size} bytes, but the checkpoint was written when it had {length}. "
                    "Restore the file, or start a new run."
                )
            # A checkpoint requires the file's name to be on the disk; `sync` only writes its content.
            sync_directory(path.parent)
        self.cut(length, lambda row: row.get("split") == VERIFICATION)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one object; numbers that are not finite become null, because JSON has no other word for them."""
        with storage_errors(self.path):
            rest = json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
            while rest:  # a disk that is almost full writes only a part
                rest = rest[self._file.write(rest) :]

    @property
    def length(self) -> int:
        """The length in bytes."""
        return self._file.tell()

    def sync(self) -> None:
        """Waits until all rows are on the disk; may be called from another thread."""
        with storage_errors(self.path):
            os.fsync(self._file.fileno())

    def cut(self, length: int, keep: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
        """Removes the rows after the first `length` bytes, except those that `keep` accepts."""
        with storage_errors(self.path):
            with self.path.open("rb") as file:
                file.seek(length)
                rows, _ = _rows(file.read())
            self._file.truncate(length)
            # truncate() does not move the file position, which `length` reads.
            self._file.seek(length)
        self.kept = [row for row in rows if keep(row)]
        for row in self.kept:
            self.append(row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class NoLines(JsonLines):
    """The log of a rank other than the first: it discards every row."""

    def __init__(self) -> None:
        self.kept = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Discards the row."""

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    def sync(self) -> None:
        """Does nothing."""

    def cut(self, length: int, keep: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSON-lines file, and the number of unreadable lines, such as a last one that a kill cut short.

    An absent file has no rows.
    """
    return _rows(path.read_bytes() if path.is_file() else b"")


def _rows(text: bytes) -> tuple[list[dict[str, Any]], int]:
    lines = [line for _, line in parsed_lines(text.split(b"\n"))]
    rows = [line for line in lines if not isinstance(line, BadLine)]
    return rows, len(lines) - len(rows)
