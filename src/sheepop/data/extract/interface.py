"""The types that extractors take and return."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from sheepop.data.extract.config import ExtractConfig

Kind = Literal["prose", "code", "table", "chat", "pair"]


@dataclass(frozen=True, slots=True)
class Extracted:
    """One document before any cleaning; `kind` selects the rules for cleaning it.

    `language` is the language of code, in lower case; `place` is the position in the file, such as "row 17" or "member
    a/b.txt". `marks` are (offset in characters, name) in ascending order, for pages, slides and cells. `metadata` has
    facts such as the title or licence.
    """

    text: str
    kind: Kind = "prose"
    language: str = ""
    place: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A part of a file, or with an empty `place` the file, that could not be used; `reason` is one word."""

    place: str
    reason: str
    detail: str


class ExtractionError(Exception):
    """A record, or the rest of a file, cannot be used; `reason` is one word, `detail` a clause that says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Span(NamedTuple):
    """A part of a large file that is read alone: from `begin` to before `end`, in `unit`, in `table` of a database.

    `before` counts the documents' numbers that earlier spans have used (lines, members, pages or rows), `lines` the
    lines of text before it, and `size` is its share of the file in bytes.
    """

    number: int
    begin: int
    end: int
    before: int
    size: int
    unit: str = "bytes"
    table: str = ""
    lines: int = 0

    @property
    def place(self) -> str:
        """Where it is in the file, for people."""
        return f"{f'table {self.table} ' * bool(self.table)}{self.unit} {self.begin + 1:,} to {self.end:,}"


def cut_units(sizes: Iterable[int], part_bytes: int, unit: str) -> Iterator[Span]:
    """Yields spans of consecutive units of these sizes, each of about `part_bytes`."""
    number = begin = gathered = at = 0
    for at, size in enumerate(sizes, 1):
        gathered += size
        if gathered >= part_bytes:
            yield Span(number, begin, at, begin, gathered, unit)
            number, begin, gathered = number + 1, at, 0
    if begin < at:
        yield Span(number, begin, at, begin, gathered, unit)


class _Blocks(io.RawIOBase):
    """A file that is read as `blocks` of bytes, which are made from `file`."""

    def __init__(self, file: BinaryIO, blocks: Iterator[bytes]) -> None:
        self._file, self._blocks, self._out = file, blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._out = self._out or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def buffered(file: BinaryIO, blocks: Iterator[bytes], buffer_bytes: int = 2**20) -> io.BufferedReader:
    """Returns a reader of `blocks`, which must not be empty; closing it closes `file`, from which they are made."""
    return io.BufferedReader(_Blocks(file, blocks), buffer_bytes)


class Content:
    """Bytes to extract from, on disk or in memory; the suffix of the printable file `name` may hint at the type.

    With a `span`, only that part of the file is to be read, but its beginning may be looked at.
    """

    def __init__(
        self, name: str, *, path: Path | None = None, data: bytes | None = None, span: Span | None = None
    ) -> None:
        if (path is None) == (data is None):
            raise ValueError("content is either a file or bytes")
        self.name, self.span, self._path, self._data = name, span, path, data

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._path.stat().st_size if self._path is not None else len(self._data or b"")

    @property
    def share(self) -> int:
        """The number of bytes of the span, or of all."""
        return self.span.size if self.span is not None else self.size

    def whole(self) -> Content:
        """The same without its span."""
        return Content(self.name, path=self._path, data=self._data)

    def section(self, buffer_bytes: int = 2**18) -> io.BufferedReader:
        """Opens the bytes of the span, or all, to be read in order."""
        file, span = self.open(), self.span
        if span is None:
            return io.BufferedReader(cast("io.RawIOBase", file), buffer_bytes)
        file.seek(span.begin)
        return buffered(file, iter(lambda: file.read(min(buffer_bytes, span.end - file.tell())), b""), buffer_bytes)

    @property
    def suffix(self) -> str:
        """The last suffix of the name in lower case, with its dot, or an empty string."""
        return Path(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """Opens a seekable binary file; raises OSError, and does not block on a pipe that has replaced the file."""
        if self._path is None:
            return io.BytesIO(self._data or b"")
        file = open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(0, "it is no longer a regular file")
        return file

    def read(self) -> bytes:
        """Returns all bytes."""
        return self.head(-1)

    def head(self, count: int) -> bytes:
        """Returns the first `count` bytes, or fewer if the content is shorter."""
        with self.open() as file:
            return file.read(count)

    def path(self, scratch: Path) -> Path:
        """Returns the path of the file, or of a copy of the bytes in `scratch`."""
        if self._path is None:
            with NamedTemporaryFile(dir=scratch, suffix=self.suffix, delete=False) as file:
                file.write(self._data or b"")
            self._path = Path(file.name)
        return self._path


Documents = Iterator[Extracted | Refused]
"""The documents and refusals in content, in order."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an extractor needs besides the content; `scratch` is its directory for temporary files.

    `inner(content, place)` extracts content inside a container, within the limits on depth and size, and prefixes the
    places of its results with `place`. `alive()` restarts the time limit of `config.max_seconds`.
    """

    config: ExtractConfig
    scratch: Path
    inner: Callable[[Content, str], Documents]
    alive: Callable[[], None] = lambda: None


Extractor = Callable[[Content, Context], Documents]
Cutter = Callable[[Content, Context, int], Iterator[Span]]
"""Yields the spans of about so many bytes that a large file is read in; none if it must be read as a whole."""
