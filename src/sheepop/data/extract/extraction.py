"""Turns files into documents: reads text in this process, and formats that need a parser in a bounded child process."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from sheepop.core.bounded import BoundedProcess, BoundedProcessError, MemoryLimitError, ProcessDiedError, TimeLimitError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import HEAD_BYTES, FileType, detect
from sheepop.data.extract.dispatch import FORMATS, Dispatcher, clear, from_message
from sheepop.data.extract.git import BlobReader
from sheepop.data.extract.interface import Content, Documents, ExtractionError, Refused, Span
from sheepop.data.extract.languages import is_generated_text
from sheepop.data.extract.unpacking import raise_if_full

LIMITS = frozenset({"timeout", "memory"})
"""Reasons of a `Refused` that depend on the machine, so that a build with one of them cannot be repeated exactly."""
CHANGED = ("changed", "it changed while it was being read")
_CHILD = "sheepop.data.extract.dispatch"
# The fields that change when a file is written or replaced.
_state = attrgetter("st_size", "st_mtime_ns", "st_ino")


class Extraction:
    """Extracts one file after another; create one for each process and close it at the end.

    A directory for temporary files is made in `scratch`, by default in the system's temporary directory. The child
    starts with the first file that needs a parser, bounded by `config.max_seconds` and `config.max_memory_bytes`.
    """

    def __init__(self, config: ExtractConfig, scratch: Path | None = None) -> None:
        self._config, self._below = config, scratch
        self._config_text = config.model_dump_json()
        self._child = BoundedProcess(_CHILD, memory_bytes=config.max_memory_bytes, seconds=config.max_seconds)
        # Text needs no temporary files.
        self._here = Dispatcher(config, Path(os.devnull))
        self._scratch: Path | None = None
        self._blobs: BlobReader | None = None
        self._owned = ExitStack()
        weakref.finalize(self, self._owned.close)

    def spans(self, path: Path, name: str, part_bytes: int) -> list[Span]:
        """Returns the spans of about `part_bytes` in which a large file is to be read; none to read it as a whole.

        What is wrong with a file is found when it is read.
        """
        content = Content(name, path=path)
        try:
            file_type = _detected(content)
            if not FORMATS[file_type.name].cutter:
                return []
            # Equal parts, so that the last is not much smaller.
            part_bytes = -(-content.size // max(1, round(content.size / part_bytes)))
            request = self._request(name, path, file_type) | {"part_bytes": part_bytes}
            with closing(self._child.request(request)) as answers:
                spans = [Span(*message) for message in answers]
        except (ExtractionError, OSError, BoundedProcessError):
            return []
        return spans if len(spans) > 1 else []

    def documents(self, path: Path, name: str, span: Span | None = None) -> Documents:
        """Yields the documents and refusals of the file at `path`, or of its `span`; its printable name is `name`.

        A `Refused` with an empty place concerns the file; the documents before it remain valid. A file that changed
        meanwhile is refused as ``changed``. Raises only `StorageError`, if the disk for temporary files is full.
        """
        content = Content(name, path=path, span=span)
        try:
            with content.open() as file:
                before = _state(os.fstat(file.fileno()))
                file_type = _detected(content, file.read(HEAD_BYTES))
                whole = None if span or FORMATS[file_type.name].bounded else self._whole(file, before)
        except (ExtractionError, OSError) as error:
            yield _refused(error)
            return
        if whole is not None:
            yield from self._here.documents(Content(name, data=whole), file_type)
            return
        yield from self._read(content, file_type)
        with suppress(OSError):
            if _state(path.stat()) == before:
                return
        yield Refused("", *CHANGED)

    def blob(self, repository: Path, blob: str, name: str) -> Documents:
        """Yields the documents of the file with this full hash in a git repository; refuses generated code."""
        directory = self._directory("blob")
        try:
            with self._reader(repository).content(blob, name, directory) as content:
                file_type = _detected(content)
                beginning = content.head(HEAD_BYTES).decode("utf-8", "replace") if file_type.name == "code" else ""
                if is_generated_text(beginning):
                    yield Refused("", "generated", "its first lines say that a program wrote it")
                else:
                    yield from self._read(content, file_type)
        except (ExtractionError, OSError) as error:
            raise_if_full(error, directory)
            yield _refused(error)

    def _read(self, content: Content, file_type: FileType) -> Documents:
        if not FORMATS[file_type.name].bounded:
            yield from self._here.documents(content, file_type)
            return
        directory = self._directory("content")
        try:
            yield from self._bounded(content.name, content.path(directory), file_type, content.span)
        finally:
            clear(directory)

    def close(self) -> None:
        """Ends the child process and removes temporary files."""
        self._child.close()
        self._owned.close()
        self._scratch = self._blobs = None

    def _whole(self, file: BinaryIO, before: tuple[int, int, int]) -> bytes | None:
        """Returns all bytes of an open file, or None if it is longer than the longest document."""
        size, *_ = before
        if size > self._config.max_document_bytes:
            return None
        file.seek(0)
        data = file.read(size + 1)
        if len(data) != size or _state(os.fstat(file.fileno())) != before:
            raise ExtractionError(*CHANGED)
        return data

    def _request(self, name: str, path: Path, file_type: FileType) -> dict[str, Any]:
        place = {"path": str(path), "name": name, "scratch": str(self._directory("work"))}
        return {**place, "type": astuple(file_type), "config": self._config_text}

    def _bounded(self, name: str, path: Path, file_type: FileType, span: Span | None) -> Documents:
        request = self._request(name, path, file_type) | {"span": span}
        delivered = 0
        # Files read earlier may have caused the death of the process, so this file is tried again in a new one.
        for is_last in (self._child.requests == 0, True):
            try:
                with closing(self._child.request(request)) as answers:
                    for message in islice(answers, delivered, None):
                        delivered += 1
                        yield from_message(message)
                return
            except BoundedProcessError as error:
                if is_last or not isinstance(error, MemoryLimitError | ProcessDiedError):
                    reasons = {TimeLimitError: "timeout", MemoryLimitError: "memory"}
                    yield Refused("", reasons.get(type(error), "damaged"), str(error))
                    return
            finally:
                clear(self._directory("work"))

    def _reader(self, repository: Path) -> BlobReader:
        if self._blobs is None or not self._blobs.is_open or self._blobs.path != repository:
            if self._blobs is not None:
                self._blobs.close()
            self._blobs = BlobReader(repository, self._config.max_seconds)
            self._owned.callback(self._blobs.close)
        return self._blobs

    def _directory(self, name: str) -> Path:
        """Returns the directory `name` for temporary files; creates it on first use."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="sheepop-extract-", dir=self._below))
            self._owned.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        directory = self._scratch / name
        directory.mkdir(exist_ok=True)
        return directory


def _detected(content: Content, head: bytes | None = None) -> FileType:
    try:
        return detect(content, head)
    except (ExtractionError, OSError):
        raise
    except Exception as error:
        raise ExtractionError("damaged", f"{type(error).__name__} while its type was being detected") from None


def _refused(error: ExtractionError | OSError) -> Refused:
    if isinstance(error, ExtractionError):
        return Refused("", error.reason, error.detail)
    return Refused("", "unreadable", (error.strerror or str(error)).lower())
