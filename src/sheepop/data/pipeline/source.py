"""Where documents of a part come from: its inputs, read for the first time, or what the pass before left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sheepop.core.errors import DataError
from sheepop.data.clean.ledger import Ledger, utf8_length
from sheepop.data.config import DocumentMode
from sheepop.data.documents import Draft, is_empty, split_text
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import LIMITS, Extraction
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.pipeline.inventory import Entry, Query, read_plan
from sheepop.data.pipeline.parts import FinishedPart, part_path
from sheepop.data.pipeline.removals import read_removals

SCRATCH = "scratch"


@dataclass(frozen=True)
class SourceSettings:
    """What reading depends on beside the files."""

    extract: ExtractConfig
    mode: DocumentMode
    query: Query | None = None


class Source(Protocol):
    """Documents by the number of their part."""

    def documents(self, rank: int, ledger: Ledger) -> Iterator[Draft]:
        """The documents of part `rank` in order; what is left out is noted in `ledger`."""


@dataclass(frozen=True)
class Earlier(Source):
    """What the pass in `directory` left, without the documents that `removals` say go."""

    directory: Path
    removals: Path | None

    def documents(self, rank: int, ledger: Ledger) -> Iterator[Draft]:
        """As `Source` has it."""
        removals = read_removals(self.removals, rank)
        for index, stored in enumerate(FinishedPart(part_path(self.directory, rank)).documents()):
            document, removal = stored.document().draft(), removals.get(index)
            if removal is None:
                yield document
            else:
                ledger.removed(removal.stage, document, removal.reason, removal.detail)


@dataclass(frozen=True)
class Inputs(Source):
    """The inputs of the plan in `directory`."""

    directory: Path
    settings: SourceSettings

    def documents(self, rank: int, ledger: Ledger) -> Iterator[Draft]:
        """As `Source` has it."""
        reading = _Reading(self.directory, self.settings, ledger)
        for entry in read_plan(self.directory).entries(rank):
            yield from reading.documents(entry)


@dataclass(frozen=True)
class _Reading:
    """Inputs to documents, one after the other; what could not be used is noted in the ledger."""

    directory: Path
    settings: SourceSettings
    ledger: Ledger

    def documents(self, entry: Entry) -> Iterator[Draft]:
        account, part, encoding = self.ledger.source, 0, ""
        account.input_bytes += entry.size
        about_file: list[Refused] = []
        for item in self._extracted(entry):
            if isinstance(item, Refused):
                if item.place:
                    self._refuse(entry, item)
                else:
                    about_file.append(item)
                continue
            encoding = encoding or item.metadata.get("encoding", "")
            for text in self._cut(item):
                if is_empty(text):
                    account.empty += 1
                else:
                    account.documents += 1
                    account.num_bytes += utf8_length(text)
                    account.kinds[item.kind] += 1
                    yield _draft(text, part, item, entry)
                part += 1
        if part:
            account.read += 1
            account.encodings.update([encoding] if encoding else [])
            for item in about_file:
                self._refuse(entry, item)
        else:
            first, *others = about_file or [Refused("", "empty", "there is no text in it")]
            self._skip(entry, first)
            for item in others:
                self._refuse(entry, item)

    def _refuse(self, entry: Entry, item: Refused) -> None:
        """A place in a file that gives documents otherwise."""
        self.ledger.source.refused[item.reason] += 1
        self._note(entry, item)

    def _skip(self, entry: Entry, item: Refused) -> None:
        """A file that gives no document at all."""
        self.ledger.source.skipped[item.reason] += 1
        self._note(entry, item)

    def _note(self, entry: Entry, item: Refused) -> None:
        place, detail = _valid(item.place), _valid(item.detail)
        name = f"{entry.source}: {place}" if place else entry.source
        if item.reason in LIMITS:
            self.ledger.source.limits.append(f"{name}: {detail}")
        record = {"file": entry.source, "stage": "extract", "reason": item.reason, "detail": detail}
        self.ledger.quarantine({**record, "place": place} if place else record)

    def _extracted(self, entry: Entry) -> Iterator[Extracted | Refused]:
        if entry.type == "query":
            return self._rows()
        extraction = _extraction(self.settings.extract, self.directory / SCRATCH)
        if entry.type == "git":
            return extraction.blob(Path(entry.path), entry.revision, entry.source)
        return extraction.documents(Path(entry.path), entry.source)

    def _rows(self) -> Iterator[Extracted | Refused]:
        """The rows of the query, all of them or an error: half an answer is not what was asked for."""
        from sheepop.data.extract.query import read_query

        assert self.settings.query is not None
        try:
            yield from read_query(self.settings.query.url, self.settings.query.text, self.settings.extract)
        except ExtractionError as error:
            raise DataError(f"The query could not be read to its end: {error.detail.rstrip('.')}.") from None

    def _cut(self, item: Extracted) -> list[str]:
        """Running text is cut as `data.documents` says; records, pages and tables are documents of their own."""
        whole = item.marks or item.kind not in ("prose", "code")
        return [item.text] if whole else split_text(item.text, self.settings.mode)


# One for each process: starting a child for every part would cost more than many parts do.
_extractions: dict[tuple[ExtractConfig, Path], Extraction] = {}


def _extraction(config: ExtractConfig, scratch: Path) -> Extraction:
    if (config, scratch) not in _extractions:
        close_extraction()
        scratch.mkdir(exist_ok=True)
        _extractions[config, scratch] = Extraction(config, scratch)
    return _extractions[config, scratch]


def close_extraction() -> None:
    """Ends the child process that this process reads files with, if there is one."""
    while _extractions:
        _extractions.popitem()[1].close()


def _draft(text: str, part: int, item: Extracted, entry: Entry) -> Draft:
    facts = {**dict(entry.facts), **item.metadata}
    facts.pop("encoding", None)
    return Draft(
        text,
        entry.source,
        part,
        item.kind,
        item.language,
        _valid(item.place),
        [(offset, _valid(name)) for offset, name in item.marks],
        {_valid(name): _valid(value) for name, value in facts.items()},
    )


def _valid(text: str) -> str:
    """Names inside files may hold half of a surrogate pair, which no file can; it becomes ``\\udNNN``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
