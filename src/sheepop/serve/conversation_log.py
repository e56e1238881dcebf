"""The log of a server: answers and votes as lines of JSON, in files that only grow and that are safe to cut or kill.

A log is a directory of files. Each process writes files of its own, so any number of processes can share a directory.
Every line has a number and a check sum of itself and of its file's name, so a reader notices lines that were changed,
moved, removed or cut, and reads the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.files import make_directory, storage_errors, sync_directory
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import PiiConfig, SecretsConfig
from sheepop.data.clean.pii import PiiReplacement
from sheepop.data.clean.secrets import SecretsReplacement
from sheepop.data.documents import Draft

_FORMAT = 1
SUFFIX = ".conversations.jsonl"
_FILE_BYTES = 16 * 2**20
_DAY = 86400.0
_DIGEST_BYTES = 8
_CHECK = b',"check":"'
_TAIL = len(_CHECK) + 2 * _DIGEST_BYTES + 2  # with the digits of the check sum, a quotation mark and a brace
_LONGEST_LINE = 64 * 2**20


def cleaned(value: Any, replacements: tuple[PiiReplacement, SecretsReplacement]) -> Any:
    """Returns JSON with placeholders for the personal data and secrets in all of its strings, except keys."""
    if isinstance(value, str):
        for stage in replacements:
            value, _ = stage.changed(value, Draft(value, "", 0))
        return value
    if isinstance(value, Mapping):
        return {key: cleaned(each, replacements) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(each, replacements) for each in value]
    return value


class ConversationLog:
    """Appends records to a log, whose files together stay below `max_bytes` and are no older than `max_days`.

    Texts are cleaned with a salt that only this object knows, so a person has one placeholder in a process's records,
    and nobody can test a guess. Raises `OutputError` for a directory that cannot be written. One thread may use it.
    """

    def __init__(self, directory: str | Path, *, max_bytes: int, max_days: float) -> None:
        self.directory, self._max_bytes, self._max_days = Path(directory), max_bytes, max_days
        salt = secrets.token_hex(16)
        account = Account(0)
        self._replacements = (
            PiiReplacement(account, PiiConfig(salt=salt, addresses="all")),
            SecretsReplacement(account, SecretsConfig(salt=salt)),
        )
        self._stream = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self._num_files = self._size = self._number = 0
        self._file: Any = None
        with storage_errors(self.directory):
            make_directory(self.directory)
        self._begin()

    def append(self, record: Mapping[str, Any], **texts: Any) -> None:
        """Appends a record with `texts`, which are cleaned first; the operating system has it when this returns.

        Raises `StorageError` if it cannot be written; the log then has all earlier records, and goes on with the next.
        """
        found = {**record, **cleaned(texts, self._replacements)}
        if self._file is None or self._size >= _FILE_BYTES:
            self._begin()
        self._write(found)

    def close(self) -> None:
        """Ends the current file and moves it to disk; may be called again."""
        file, self._file = self._file, None
        if file is not None:
            with storage_errors(self.directory), file:
                os.fsync(file.fileno())

    def _begin(self) -> None:
        """Begins a file, and removes the oldest ones that exceed the limits."""
        self.close()
        self._num_files += 1
        self._name = f"{self._stream}-{self._num_files:06d}{SUFFIX}"
        self._number = self._size = 0
        self._remove_old()
        with storage_errors(self.directory):
            self._file = (self.directory / self._name).open("xb", buffering=0)
            sync_directory(self.directory)
        self._write({"format": _FORMAT, "stream": self._stream, "file": self._num_files})

    def _write(self, record: Mapping[str, Any]) -> None:
        # Escapes, since a client may send half of a surrogate pair, which UTF-8 cannot hold.
        body = json.dumps({"number": self._number, **record}, separators=(",", ":")).encode()[:-1]
        line = b"".join((body, _CHECK, check_sum(self._name, body), b'"}\n'))
        with storage_errors(self.directory / self._name):
            try:
                left = memoryview(line)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                # What follows a torn line goes to a new file, so that the line stays the last one of its own.
                self._file.close()
                self._file = None
                raise
        self._number += 1
        self._size += len(line)

    def _remove_old(self) -> None:
        """Removes files that no process has written to for `max_days`, then the oldest that exceed `max_bytes`."""
        found = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another process has removed it
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        oldest = datetime.now(UTC).timestamp() - self._max_days * _DAY
        room = self._max_bytes - _FILE_BYTES
        for modified, size, path in sorted(found, reverse=True):
            room -= size
            if modified < oldest or room < 0:
                path.unlink(missing_ok=True)


def check_sum(file_name: str, body: bytes) -> bytes:
    """The check sum of a line without it, as hexadecimal digits; `file_name` binds the line to its file."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=file_name.encode()[:64]).hexdigest().encode()


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
            elif record.get("format", 0) > _FORMAT:
                raise DataError(
                    f"{path} has format {record['format']}, and this version reads up to {_FORMAT}. Update SheepOp."
                )


def _checked(file_name: str, line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if it is none, or if its check sum is not that of its content."""
    body, tail = line[: -_TAIL - 1], line[-_TAIL - 1 :]
    if tail != b"".join((_CHECK, check_sum(file_name, body), b'"}\n')):
        return None
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("number"), int) else None
