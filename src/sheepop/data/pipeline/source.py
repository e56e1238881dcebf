"""Inputs to documents, read for the first time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sheepop.core.errors import DataError
from sheepop.data.clean.ledger import Ledger, utf8_length
from sheepop.data.config import DataConfig
from sheepop.data.discovery import Entry
from sheepop.data.documents import Draft, is_empty, split_text
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import LIMITS, Extraction
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.pipeline.workplace import Plan, Query

_SCRATCH = "scratch"


def read_inputs(plan: Plan, rank: int, config: DataConfig, query: Query | None, ledger: Ledger) -> Iterator[Draft]:
    """The documents of part `rank` of the plan, in order; what could not be used is noted in `ledger`."""
    for entry in plan.entries(rank):
        yield from _documents(entry, _items(entry, plan.directory / _SCRATCH, config.extract, query), config, ledger)


def _documents(
    entry: Entry, items: Iterator[Extracted | Refused], config: DataConfig, ledger: Ledger
) -> Iterator[Draft]:
    account, part, encoding = ledger.source, 0, ""
    account.input_bytes += entry.size
    about_file: list[Refused] = []
    for item in items:
        if isinstance(item, Refused):
            if item.place:
                _note(ledger, account.refused, entry, item)
            else:
                about_file.append(item)
            continue
        encoding = encoding or item.metadata.get("encoding", "")
        # Running text is cut as `data.documents` says; records, pages and tables are documents of their own.
        whole = item.marks or item.kind not in ("prose", "code")
        for text in [item.text] if whole else split_text(item.text, config.documents):
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
    else:  # the file gives no document at all
        first, *about_file = about_file or [Refused("", "empty", "there is no text in it")]
        _note(ledger, account.skipped, entry, first)
    for item in about_file:
        _note(ledger, account.refused, entry, item)


def _note(ledger: Ledger, reasons: Counter[str], entry: Entry, item: Refused) -> None:
    reasons[item.reason] += 1
    place, detail = _valid(item.place), _valid(item.detail)
    if item.reason in LIMITS:
        ledger.source.limits.append(f"{entry.source}{f': {place}' if place else ''}: {detail}")
    record = {"file": entry.source, "stage": "extract", "reason": item.reason, "detail": detail}
    ledger.quarantine({**record, "place": place} if place else record)


def _items(entry: Entry, scratch: Path, config: ExtractConfig, query: Query | None) -> Iterator[Extracted | Refused]:
    if entry.type == "query":
        assert query is not None
        return _rows(query, config)
    extraction = _extraction(config, scratch)
    if entry.type == "git":
        return extraction.blob(Path(entry.path), entry.revision, entry.source)
    return extraction.documents(Path(entry.path), entry.source)


def _rows(query: Query, config: ExtractConfig) -> Iterator[Extracted | Refused]:
    """The rows of the query, all of them or an error: half an answer is not what was asked for."""
    from sheepop.data.extract.query import read_query

    try:
        yield from read_query(query.url, query.text, config)
    except ExtractionError as error:
        raise DataError(f"The query could not be read to its end: {error.detail.rstrip('.')}.") from None


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
