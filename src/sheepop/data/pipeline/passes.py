"""Reads and cleans the documents of a build in passes over parts, with decisions between the passes.

Stages that judge one document at a time run together in one pass. A stage that compares all documents ends the pass
before it: that pass writes signatures, the decision lists the documents to remove, and the next pass removes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from sheepop.core.config import Config
from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.core.files import write_json
from sheepop.data.clean.account import Account, utf8_length
from sheepop.data.clean.config import CleanConfig
from sheepop.data.clean.decontamination import Decontamination
from sheepop.data.clean.formatting import Formatting
from sheepop.data.clean.language import LanguageFilter
from sheepop.data.clean.pii import PiiReplacement
from sheepop.data.clean.quality import QualityFilter
from sheepop.data.clean.secrets import SecretsReplacement
from sheepop.data.clean.stage import Stage
from sheepop.data.clean.toxicity import ToxicityFilter
from sheepop.data.config import DataConfig
from sheepop.data.corpus import DOCUMENTS
from sheepop.data.discovery import Entry
from sheepop.data.documents import Document, Draft, is_empty, read_documents_file, split_text
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import CHANGED, LIMITS, Extraction
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused, Span
from sheepop.data.manifest import read_manifest
from sheepop.data.mixing import Mixture
from sheepop.data.pipeline.engine import Engine, run_pass
from sheepop.data.pipeline.parts import (
    ACCOUNT,
    SIGNATURES,
    FinishedPart,
    Removal,
    document_name,
    finished_parts,
    write_part,
    write_removals,
)
from sheepop.data.pipeline.workplace import Inventory, Query
from sheepop.data.shards import FILE_PREFIX

_SCRATCH = "scratch"
GLOBAL_STAGES = ("exact_duplicates", "near_duplicates")
"""The stages that compare all documents."""


def split_into_passes(stages: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Groups stages into passes: stages that judge single documents, then the global stages that follow them."""
    passes: list[tuple[list[str], list[str]]] = [([], [])]
    for name in stages:
        is_global = name in GLOBAL_STAGES
        if passes[-1][1] and not is_global:
            passes.append(([], []))
        passes[-1][is_global].append(name)
    return passes


def local_stages(config: CleanConfig, names: Iterable[str], account: Account, seed: int) -> list[Stage]:
    """The stages with these names, in this order; raises KeyError for a name that is not such a stage."""
    stages: dict[str, tuple[type[Stage], Config]] = {
        "formatting": (Formatting, config.formatting),
        "language": (LanguageFilter, config.language),
        "quality": (QualityFilter, config.quality),
        "toxicity": (ToxicityFilter, config.toxicity),
        "pii": (PiiReplacement, config.pii),
        "secrets": (SecretsReplacement, config.secrets),
        "decontamination": (Decontamination, config.decontamination),
    }
    return [stage(account, settings, seed=seed) for stage, settings in map(stages.__getitem__, names)]


@dataclass(frozen=True)
class CleanPart:
    """Cleans a part of the inventory or the `earlier` pass by the `local` stages; signs it for the `decided` ones."""

    inventory: Inventory
    query: Query | None
    earlier: Path | None
    config: DataConfig
    local: Sequence[str]
    decided: Sequence[str]
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes the documents that stay, and the account."""
        clean, account = self.config.clean, Account(self.seed)
        account.begin(staging)
        with closing(account):
            documents: Iterator[Draft]
            # An interrupt anywhere closes the reader at once, before its temporary files are removed.
            with closing(self._read(rank, account)) as read:
                documents = read
                for stage in local_stages(clean, self.local, account, self.seed):
                    documents = stage.run(documents)
                finished, mixture = (draft.finished() for draft in documents), Mixture(self.config.mix)
                near = clean.near_duplicates if "near_duplicates" in self.decided else None
                write_part(staging, finished, mixture, sign=bool(self.decided), near=near)
        write_json(staging / ACCOUNT, account.as_record())

    def _read(self, rank: int, account: Account) -> Generator[Draft]:
        if self.earlier is not None:
            yield from (stored.document().draft() for stored in FinishedPart(self.earlier, rank).kept(account))
            return
        for entry in self.inventory.entries(rank):
            items = _items(entry, self.inventory.directory / _SCRATCH, self.config.extract, self.query)
            yield from _documents(entry, items, self.config, account)


def clean_documents(
    inventory: Inventory, config: DataConfig, query: Query | None, seed: int, engine: Engine, console: Console
) -> list[Path]:
    """Runs every pass; returns their directories; the last one has the documents."""
    directories: list[Path] = []
    for number, (local, decided) in enumerate(split_into_passes(config.clean.stages)):
        directory = inventory.directory / f"pass-{number}"
        work = CleanPart(inventory, query, directories[-1] if number else None, config, local, decided, seed)
        run_pass(
            engine, directory, work, inventory.megabytes, console, "Cleaning" if number else "Reading and cleaning"
        )
        if decided:
            parts = finished_parts(directory, len(inventory.parts))
            write_removals(directory, _decide(parts, decided, config.clean, directory, console))
        directories.append(directory)
    return directories


def _decide(
    parts: Sequence[FinishedPart], decided: Sequence[str], config: CleanConfig, directory: Path, console: Console
) -> Iterator[Removal]:
    """Yields the documents of `parts` that the stages `decided` remove; those of earlier corpora always stay."""
    near = config.near_duplicates if "near_duplicates" in decided else None
    earlier = earlier_files(config.near_duplicates.against)
    signed = directory / "earlier"
    signed.mkdir(exist_ok=True)
    signatures = [sign_file(file, signed / f"{number:05d}", near) for number, file in enumerate(earlier)]
    signatures += [PartSignatures.open(part.path / SIGNATURES, near) for part in parts]

    def read(number: int) -> Iterator[Document]:
        if number < len(earlier):
            return read_documents_file(earlier[number])
        return (stored.document() for stored in parts[number - len(earlier)].documents())

    @lru_cache(maxsize=16)
    def names(number: int) -> list[str]:
        if number < len(earlier):
            return [document_name(document) for document in read_documents_file(earlier[number])]
        return parts[number - len(earlier)].names()

    exact = "exact_duplicates" in decided
    for removed in find_duplicates(signatures, read, near, directory / "deciding", exact=exact, console=console):
        what = "an equal document" if removed.reason == "exact" else f"{removed.similarity:.2f} like"
        detail = f"{what}: {names(removed.kept_part)[removed.kept_index]}"
        stage, reason = f"{removed.reason}_duplicates", f"{removed.reason} copy"
        yield Removal(removed.part - len(earlier), removed.index, stage, reason, detail)


def earlier_files(corpora: Iterable[str | Path]) -> list[Path]:
    """The document files of finished corpora, split by split; raises `DataError` for a directory that is not one."""
    files: list[Path] = []
    for directory in map(Path, corpora):
        read_manifest(directory)
        for prefix in FILE_PREFIX.values():
            files += sorted((directory / DOCUMENTS).glob(f"{prefix}-*.jsonl.zst"))
    return files


def sign_file(file: Path, target: Path, near: NearDuplicatesConfig | None) -> PartSignatures:
    """Writes the signatures of a corpus's document file to `target`; raises `DataError` for a damaged file."""
    with SignatureWriter(target, near) as writer:
        for document in read_documents_file(file):
            try:
                writer.add(document)
            except ValueError as error:
                raise DataError(f"{file} is damaged ({error}). Build that corpus again.") from None
    return PartSignatures.open(target, near, protected=True)


def _documents(
    entry: Entry, items: Iterator[Extracted | Refused], config: DataConfig, account: Account
) -> Iterator[Draft]:
    """Yields the documents of an input, in order; records in `account` what could not be used.

    A file that is read in spans counts as read with its first one; a span without documents is a part of it that could
    not be used.
    """
    source, span, encoding = account.source, entry.span, ""
    first_part = part = span.before if span else 0
    bytes_before = source.num_bytes
    source.input_bytes += entry.size
    about_file: list[Refused] = []
    for item in items:
        if isinstance(item, Refused):
            if item.place:
                _note(account, source.refused, entry, item)
            else:
                about_file.append(item)
            continue
        encoding = encoding or item.metadata.get("encoding", "")
        # `data.documents` cuts running text; records, pages and tables are always single documents.
        whole = item.marks or item.kind not in ("prose", "code")
        for text in [item.text] if whole else split_text(item.text, config.documents):
            if is_empty(text):
                source.empty += 1
            else:
                source.documents += 1
                source.num_bytes += utf8_length(text)
                source.kinds[item.kind] += 1
                yield _draft(text, part, item, entry)
            part += 1
    if span is not None:
        about_file = [replace(item, place=f"{span.place} of the file") for item in about_file]
        first_part -= 1
    if part > first_part:
        is_first = span is None or span.number == 0
        source.read += is_first
        source.encodings.update([encoding] if encoding and is_first else [])
    else:  # the file gives no document at all
        first, *about_file = about_file or [Refused("", "empty", "there is no text in it")]
        _note(account, source.skipped, entry, first)
    for item in about_file:
        _note(account, source.refused, entry, item)
    text_bytes = source.num_bytes - bytes_before
    account.file(entry.source, entry.size, text_bytes, is_first=span is None or span.number == 0)


def _note(account: Account, reasons: Counter[str], entry: Entry, item: Refused) -> None:
    reasons[item.reason] += 1
    place, detail = _valid(item.place), _valid(item.detail)
    if item.reason in LIMITS:
        account.source.limits.append(f"{entry.source}{f': {place}' if place else ''}: {detail}")
    record = {"file": entry.source, "stage": "extract", "reason": item.reason, "detail": detail}
    account.quarantine({**record, "place": place} if place else record)


def spans_of(workplace: Path, config: ExtractConfig, entry: Entry, part_bytes: int) -> list[Span]:
    """Returns the spans of a large input, see `sheepop.data.pipeline.workplace.Cut`."""
    if entry.type != "file":
        return []
    return _extraction(workplace / _SCRATCH, config).spans(Path(entry.path), entry.source, part_bytes)


def _extraction(scratch: Path, config: ExtractConfig) -> Extraction:
    """Returns the reader of this process, which starts one child for all files with the same settings."""
    if (extraction := _extractions.get((config, scratch))) is None:
        close_extraction()
        scratch.mkdir(exist_ok=True)
        extraction = _extractions[config, scratch] = Extraction(config, scratch)
    return extraction


def _items(entry: Entry, scratch: Path, config: ExtractConfig, query: Query | None) -> Iterator[Extracted | Refused]:
    if entry.type == "query":
        assert query is not None
        return _rows(query, config)
    extraction, path = _extraction(scratch, config), Path(entry.path)
    if entry.type == "git":
        return extraction.blob(path, entry.revision, entry.source)
    if entry.span is not None and path.stat().st_mtime_ns != entry.modified_ns:
        return iter([Refused("", *CHANGED)])
    return extraction.documents(path, entry.source, entry.span)


def _rows(query: Query, config: ExtractConfig) -> Iterator[Extracted | Refused]:
    """Yields all rows of the query; raises `DataError` instead of stopping early."""
    from sheepop.data.extract.query import read_query

    try:
        yield from read_query(query.url, query.text, config)
    except ExtractionError as error:
        raise DataError(f"The query could not be read to its end: {error.detail.rstrip('.')}.") from None


# At most one per process: starting a child for every part would take longer than many parts do.
_extractions: dict[tuple[ExtractConfig, Path], Extraction] = {}


def close_extraction() -> None:
    """Ends the child process that reads files for this process, if there is one."""
    while _extractions:
        _extractions.popitem()[1].close()


def _draft(text: str, part: int, item: Extracted, entry: Entry) -> Draft:
    facts = {**dict(entry.facts), **item.metadata}
    facts.pop("encoding", None)
    facts = {_valid(name): _valid(value) for name, value in facts.items()}
    marks = [(offset, _valid(name)) for offset, name in item.marks]
    return Draft(text, entry.source, part, item.kind, item.language, _valid(item.place), marks, facts)


def _valid(text: str) -> str:
    """Replaces lone surrogates, which names inside files may have and UTF-8 cannot encode, with ``\\udNNN``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
