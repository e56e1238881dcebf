"""The course of a run as data: ``metrics.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError
from sheepop.core.files import finite, storage_errors, sync_directory


class JsonLines:
    """An append-only file of JSON objects whose length is part of every checkpoint.

    On resume the file is cut back to the length the checkpoint recorded, so that no line is repeated or missing.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
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
            self._file.truncate(length)
            # A checkpoint counts on the file being there; what is synced later is its content alone.
            sync_directory(path.parent)
            # Cutting leaves the position where it was, and `sync` tells the length by it.
            self._file.seek(length)

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

    def cut(self, length: int) -> list[dict[str, Any]]:
        """Removes, and returns, the rows that were appended after the file had `length` bytes."""
        with storage_errors(self.path):
            with self.path.open("rb") as file:
                file.seek(length)
                rows = [json.loads(line) for line in file]
            self._file.truncate(length)
            self._file.seek(length)
        return rows

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSON-lines file, and how many of its lines hold none, such as a last line cut by a kill.

    An absent file has no rows.
    """
    rows, num_unreadable = [], 0
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            num_unreadable += 1
    return rows, num_unreadable
