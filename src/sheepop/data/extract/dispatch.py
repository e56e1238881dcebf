"""Content to documents with whatever extractor fits, nested content too; what fails becomes a `Refused`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.cutting import pieces_of
from sheepop.data.extract.detection import FileType, detect
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused, nobody_waits
from sheepop.data.extract.pair import KIND
from sheepop.data.extract.registry import FORMATS
from sheepop.data.extract.spool import expansion_limit, raise_if_full

_DEEPEST_CONTENT = 2
_DETAIL_CHARACTERS = 300
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class _ExhaustedError(ExtractionError):
    """More came out of a file than may; nothing more of it is read."""


@dataclass
class _Budget:
    """Bytes that may still come out of one file: unpacked from its containers, and as text."""

    limit: int
    unpacked: int = 0
    text: int = 0

    def spend(self, *, unpacked: int = 0, text: int = 0) -> None:
        self.unpacked += unpacked
        self.text += text
        self.check()

    def check(self) -> None:
        if max(self.unpacked, self.text) > self.limit:
            raise _ExhaustedError("bomb", f"it unpacks to over {self.limit:,} bytes; see data.extract.max_expansion")


class Dispatcher:
    """Finds the extractor for each content and keeps to the limits of `config`; `scratch` is for temporary files.

    `alive` is handed to the extractors, see `Context`.
    """

    def __init__(self, config: ExtractConfig, scratch: Path, alive: Callable[[], None] = nobody_waits) -> None:
        self.config, self.scratch, self.alive = config, scratch, alive

    def documents(self, content: Content, file_type: FileType | None = None) -> Iterator[Extracted | Refused]:
        """The documents in `content`, whose type may be known already, and what in it was refused, with places.

        What concerns all of it has an empty place. Raises MemoryError, and `StorageError` when there is no room for
        temporary files; nothing else.
        """
        try:
            budget = _Budget(expansion_limit(content.size, self.config))
        except OSError as error:
            yield self._unreadable("", error)
            return
        try:
            for item in self._documents(content, file_type, "", 0, budget):
                yield from self._checked(item, budget)
            # An extractor may have taken the end of the budget for one of its own errors.
            budget.check()
        except _ExhaustedError as error:
            yield Refused("", error.reason, error.detail)

    def _documents(
        self, content: Content, file_type: FileType | None, place: str, depth: int, budget: _Budget
    ) -> Iterator[Extracted | Refused]:
        extra = ""
        try:
            file_type = file_type or detect(content)
            row = FORMATS[file_type.name]
            extra = row.extra
            most = self.config.max_depth + (0 if row.container else _DEEPEST_CONTENT)
            if depth > most:
                raise ExtractionError("nested", f"it is nested {depth} containers deep; see data.extract.max_depth")
            for item in row.load()(content, self._context(depth, budget)):
                yield _placed(item, place, file_type)
        except (MemoryError, StorageError, _ExhaustedError):
            raise
        except ExtractionError as error:
            yield Refused(place, error.reason, self._clean(error.detail))
        except ImportError as error:
            yield Refused(place, "not_installed", f"{error.name or error} is not installed: {_installation(extra)}")
        except OSError as error:
            raise_if_full(error, self.scratch)
            yield self._unreadable(place, error)
        except Exception as error:
            yield Refused(place, "damaged", self._clean(f"{type(error).__name__}: {error}"))

    def _context(self, depth: int, budget: _Budget) -> Context:
        def inner(content: Content, place: str) -> Iterator[Extracted | Refused]:
            budget.spend(unpacked=content.size)
            return self._documents(content, None, place, depth + 1, budget)

        return Context(self.config, self.scratch, inner, self.alive)

    def _checked(self, item: Extracted | Refused, budget: _Budget) -> Iterator[Extracted | Refused]:
        """The item, cut when it is too long, refused when it is no valid text."""
        if isinstance(item, Refused):
            yield item
            return
        budget.spend(text=len(item.text))
        if self.config.pair is not None and item.kind != KIND:
            names = " and ".join(map(repr, self.config.pair))
            detail = f"it has no records with the fields {names}, which data.extract.pair asks for"
            yield Refused(item.place, "unsupported", detail)
            return
        try:
            yield from pieces_of(item, self.config.max_document_bytes)
        except UnicodeEncodeError as error:
            yield Refused(
                item.place, "undecodable", f"it contains half of a surrogate pair at character {error.start:,}"
            )

    def _unreadable(self, place: str, error: OSError) -> Refused:
        return Refused(place, "unreadable", self._clean(error.strerror or str(error)).lower())

    def _clean(self, detail: str) -> str:
        """The line of a message that says most, without what differs from run to run: temporary names and addresses.

        It is the first, but the last of one that holds a traceback.
        """
        lines = [line for line in detail.splitlines() if line.strip()] or [detail]
        line = lines[-1 if "Traceback (most recent call last)" in detail else 0].strip()
        line = re.sub(re.escape(str(self.scratch)) + r"[^\s'\"]*", "a temporary file", line)
        line = _ADDRESS.sub("0x…", line)[:_DETAIL_CHARACTERS]
        return line.encode("utf-8", "backslashreplace").decode("utf-8")


def _placed(item: Extracted | Refused, place: str, file_type: FileType) -> Extracted | Refused:
    if place:
        item = replace(item, place=f"{place}, {item.place}" if item.place else place)
    if file_type.name == "code" and isinstance(item, Extracted):
        return replace(item, kind="code", language=file_type.language)
    return item


def _installation(extra: str) -> str:
    return f"install sheepop[{extra}]" if extra else "install sheepop again"
