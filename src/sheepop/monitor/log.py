"""Reads the log of a server, and notices the lines that were cut, changed, moved or removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.serve.conversation_log import CHECK, CHECK_DIGITS, FORMAT, SUFFIX, check_sum

_TAIL = len(CHECK) + CHECK_DIGITS + 2
_LONGEST_LINE = 64 * 2**20


@dataclass
class LogFaults:
    """The number of lines that a reader left out because they were changed or cut, or lack what a record of their kind
    has, and of those that are missing.
    """

    changed: int = 0
    cut: int = 0
    missing: int = 0
    unknown: int = 0

    def __str__(self) -> str:
        found = {"changed": self.changed, "cut off": self.cut, "missing": self.missing,
                 "of an unknown form": self.unknown}  # fmt: skip
        return ", ".join(f"{count} {name}" for name, count in found.items() if count)


@dataclass(frozen=True)
class Logged:
    """A record of a log, with the file and the line, from 1, that it was read from."""

    record: dict[str, Any]
    file: str
    line: int

    @property
    def place(self) -> str:
        """The record's place for messages and provenance, as ``FILE:LINE``."""
        return f"{self.file}:{self.line}"


def read_log(directory: str | Path, faults: LogFaults) -> Iterator[Logged]:
    """Yields the records of a log, file by file in the order that the files were begun; counts `faults` on the way.

    A log can be read while a server writes it and removes its oldest files. Raises `DataError` if `directory` holds no
    log, one of a newer version, or one that cannot be read.
    """
    place = Path(directory)
    paths = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else []
    if not paths:
        raise DataError(f"{place} holds no log of a server. 'sheepop serve MODEL --log {place}' writes one.")
    for path in paths:
        yield from _read_file(path, faults)


def _read_file(path: Path, faults: LogFaults) -> Iterator[Logged]:
    expected = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return  # the server has removed it since the directory was listed
    except OSError as error:
        raise DataError(f"{path} cannot be read: {(error.strerror or '').lower()}.") from None
    with file:
        for line_number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if not line.endswith(b"\n"):
                faults.cut += 1
                continue
            record = _checked(path.name, line)
            if record is None:
                faults.changed += 1
                expected += 1
                continue
            number = record.pop("number")
            faults.missing += max(0, number - expected)
            expected = number + 1
            if number:
                yield Logged(record, path.name, line_number)
            elif record.get("format", 0) > FORMAT:
                raise DataError(
                    f"{path} has format {record['format']}, and this version of SheepOp reads {FORMAT}. Update SheepOp."
                )


def _checked(file_name: str, line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if it is none, or if its check sum is not that of its content."""
    body, tail = line[: -_TAIL - 1], line[-_TAIL - 1 :]
    if tail != b"".join((CHECK, check_sum(file_name, body), b'"}\n')):
        return None
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("number"), int) else None
