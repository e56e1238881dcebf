"""What extractors are given and what they hand on."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, BinaryIO, Literal

if TYPE_CHECKING:
    from sheepop.data.extract.config import ExtractConfig

Kind = Literal["prose", "code", "table", "chat", "pair"]


@dataclass(frozen=True, slots=True)
class Extracted:
    """One document as it was found, before any cleaning, judged by the rules of its `kind`.

    `language` is that of code, in lower case; `place` is "row 17" or "member a/b.txt" within the file. `marks` are
    (offset in characters, name) in rising order: pages, slides, cells. `metadata` holds facts such as title or license.
    """

    text: str
    kind: Kind = "prose"
    language: str = ""
    place: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A part of a file, at `place`, that could not be used while the rest could; `reason` is one word."""

    place: str
    reason: str
    detail: str


class ExtractionError(Exception):
    """A record, or the rest of a file, cannot be used: `reason` is one word, `detail` a clause that says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Content:
    """Bytes to extract from: a file on disk, or a member of a container held in memory.

    `name` is a printable file name whose suffix may hint at the type.
    """

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
        """A seekable binary file, positioned at the beginning.

        Raises OSError where the file is none that can be read; a pipe or device put in its place is not waited for.
        """
        if self._path is None:
            return io.BytesIO(self._data or b"")
        file = open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(0, "it is no longer a regular file")
        return file

    def head(self, count: int) -> bytes:
        """The first `count` bytes, or fewer when there are fewer."""
        with self.open() as file:
            return file.read(count)

    def path(self, scratch: Path) -> Path:
        """A file that holds the bytes: the file itself, or a copy made below `scratch`."""
        if self._path is None:
            with NamedTemporaryFile(dir=scratch, suffix=self.suffix, delete=False) as file:
                file.write(self._data or b"")
            self._path = Path(file.name)
        return self._path


@dataclass(frozen=True, slots=True)
class Context:
    """What an extractor may need beside the content; `scratch` is a directory of its own for temporary files.

    `inner(content, place)` extracts what stands inside a container, within the limits of depth and size; its results
    carry `place` in front of their own. `alive()` grants work that goes on the whole of `config.max_seconds` again.
    """

    config: ExtractConfig
    scratch: Path
    inner: Callable[[Content, str], Iterator[Extracted | Refused]]
    alive: Callable[[], None] = lambda: None


Extractor = Callable[[Content, Context], Iterator[Extracted | Refused]]
