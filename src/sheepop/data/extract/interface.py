"""The types that extractors take and return."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, Literal

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


class Content:
    """Bytes to extract from, on disk or in memory; the suffix of the printable file `name` may hint at the type."""

    def __init__(self, name: str, *, path: Path | None = None, data: bytes | None = None) -> None:
        if (path is None) == (data is None):
            raise ValueError("content is either a file or bytes")
        self.name, self._path, self._data = name, path, data

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._path.stat().st_size if self._path is not None else len(self._data or b"")

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
