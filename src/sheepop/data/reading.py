"""One file from disk to documents, as a function that a worker process can run; what fails is a value, not an error."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sheepop.data.config import DocumentMode
from sheepop.data.decoding import UndecodableError, decode
from sheepop.data.discovery import FoundFile, Skipped
from sheepop.data.documents import Document, StoredDocument, is_empty, split_text

_TASK_BYTES = 2**22
_TASK_FILES = 256


@dataclass(frozen=True, slots=True)
class ReadFile:
    """What a file gave: its documents that are not empty, how many were, and the encoding it had."""

    file: FoundFile
    documents: list[StoredDocument]
    num_empty: int
    encoding: str


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads, decodes and cuts files; a callable that can be sent to a worker process."""

    mode: DocumentMode
    max_file_bytes: int

    def __call__(self, files: list[FoundFile]) -> list[ReadFile | Skipped]:
        """The result of each file, in order; a file that cannot be used gives the reason."""
        return [self.read(file) for file in files]

    def read(self, file: FoundFile) -> ReadFile | Skipped:
        """Reads one file."""
        try:
            data = _read_bytes(file.path, self.max_file_bytes + 1)
        except OSError as error:
            return Skipped(file.source, "read", "unreadable", (error.strerror or str(error)).lower())
        if not data:
            return Skipped(file.source, "read", "empty", "0 bytes")
        if len(data) > self.max_file_bytes:
            return Skipped(file.source, "read", "oversized", "it grew over data.max_file_bytes since it was found")
        try:
            decoded = decode(data, file.path)
        except UndecodableError as error:
            return Skipped(file.source, "decode", error.reason, error.detail)
        texts = split_text(decoded.text, self.mode)
        documents = [
            Document.of(text, file.source, part).stored() for part, text in enumerate(texts) if not is_empty(text)
        ]
        return ReadFile(file, documents, len(texts) - len(documents), decoded.encoding)


def reading_tasks(files: Iterable[FoundFile]) -> Iterator[list[FoundFile]]:
    """Consecutive files in lists of about 4 MiB: the cut depends on the files, never on the number of workers."""
    task: list[FoundFile] = []
    size = 0
    for file in files:
        if task and (size + file.size > _TASK_BYTES or len(task) == _TASK_FILES):
            yield task
            task, size = [], 0
        task.append(file)
        size += file.size
    if task:
        yield task


def _read_bytes(path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; a pipe put in its place meanwhile is refused and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no longer a regular file")
        return file.read(limit)
