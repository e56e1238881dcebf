"""JSON lines: files with one JSON object on each line."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sheepop.core.errors import CheckpointError, DataError
from sheepop.core.files import finite, storage_errors, sync_directory


@dataclass(frozen=True)
class BadLine:
    """A line without a JSON object; `reason` says why, such as ``not a JSON object``."""

    reason: str


def parsed_lines(
    lines: Iterable[bytes], parse: Callable[[bytes], Any] = orjson.loads
) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """The number of every line that is not blank, from 1, with its object or a `BadLine`.

    Give `json.loads` to `parse` for what orjson refuses: NaN, numbers beyond 64 bits and lone surrogates.
    """
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        if not text:
            continue
        try:
            value = parse(text)
        except (ValueError, RecursionError) as error:
            yield number, BadLine(f"not valid JSON ({error})")
        else:
            yield number, value if isinstance(value, dict) else BadLine("not a JSON object")


def json_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line numbers and objects of a file; raises `DataError` with file and line for anything else."""
    try:
        with Path(path).open("rb") as file:
            for number, row in parsed_lines(file):
                if isinstance(row, BadLine):
                    raise DataError(
                        f"{path}, line {number}: {row.reason}. Write one JSON object on each line, in UTF-8."
                    )
                yield number, row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {(error.strerror or '').lower()}.") from None


class Rows(NamedTuple):
    """The rows of a JSON-lines file, and the number of unreadable lines, such as a last one that a kill cut short."""

    rows: list[dict[str, Any]]
    num_unreadable: int

    def last(self, split: str) -> dict[str, Any]:
        """The last row of `split`; empty if there is none."""
        return next((row for row in reversed(self.rows) if row.get("split") == split), {})

    def at(self, step: int, split: str) -> dict[str, Any]:
        """The row of `split` at `step`; empty if there is none."""
        return next((row for row in self.rows if row.get("split") == split and row.get("step") == step), {})


def read_json_lines(path: Path) -> Rows:
    """The rows of a JSON-lines file; an absent file has none."""
    return _rows(path.read_bytes() if path.is_file() else b"")


def _rows(text: bytes) -> Rows:
    lines = [line for _, line in parsed_lines(text.split(b"\n"), json.loads)]
    rows = [line for line in lines if not isinstance(line, BadLine)]
    return Rows(rows, len(lines) - len(rows))


class JsonLines:
    """An append-only file of JSON objects whose length is part of every checkpoint.

    On resume the file is cut to the length in the checkpoint, so that no line is repeated or missing; rows that `keep`
    accepts stay. `kept` are the rows that stayed at the last cut.
    """

    def __init__(
        self, path: Path, length: int = 0, keep: Callable[[Mapping[str, Any]], bool] = lambda row: False
    ) -> None:
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
        self.cut(length, keep)

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
