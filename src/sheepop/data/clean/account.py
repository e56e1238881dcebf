"""The account of one part of the input: what was read, and what each stage removed and changed."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import IO, Any, TextIO, cast

import zstandard

from sheepop.data.documents import Draft

SAMPLES = 20
EXCERPT_CHARACTERS = 600
# A file of at least so many bytes has little text for its size if less than this share of them is text.
LEAST_JUDGED_BYTES, LITTLE_SHARE = 4096, 0.02
_SHARES = 2**40


@dataclass
class _Counts:
    """Numbers, counters and lists that are written as JSON and added up over parts."""

    def as_record(self) -> dict[str, Any]:
        """The account as JSON; counters are sorted, so that equal accounts give equal bytes."""
        names = [entry.name for entry in fields(self)]
        record = {"bytes" if name == "num_bytes" else name: getattr(self, name) for name in names}
        return {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in record.items()}


@dataclass
class StageAccount(_Counts):
    """The work of one stage: documents and bytes removed by reason, documents changed, bytes added, changes by name."""

    removed: Counter[str] = field(default_factory=Counter)
    removed_bytes: Counter[str] = field(default_factory=Counter)
    changed_documents: int = 0
    added_bytes: int = 0
    changes: Counter[str] = field(default_factory=Counter)


@dataclass
class SourceAccount(_Counts):
    """The result of reading: files read, files skipped and places in files refused by reason, and documents.

    `limits` lists the files that hit a limit of time or memory, which another run might not hit. `formats` has files,
    bytes and bytes of text by the suffix of the names.
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    num_bytes: int = 0
    empty: int = 0
    input_bytes: int = 0
    limits: list[str] = field(default_factory=list)
    formats: dict[str, dict[str, int]] = field(default_factory=dict)


class Samples:
    """The `SAMPLES` records with the lowest keys: a random sample that does not depend on the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []

    def would_take(self, key: str) -> bool:
        """Whether a record with this key (hexadecimal) would be among the lowest so far."""
        return len(self._heap) < SAMPLES or -int(key, 16) >= self._heap[0][0]

    def offer(self, key: str, record: dict[str, Any]) -> None:
        """Adds the record if its key (hexadecimal) is among the lowest so far."""
        if self.would_take(key):
            heapq.heappush(self._heap, (-int(key, 16), json.dumps(record, ensure_ascii=False, sort_keys=True)))
            if len(self._heap) > SAMPLES:
                heapq.heappop(self._heap)

    def as_record(self) -> list[dict[str, Any]]:
        """The chosen records with their keys, lowest key first."""
        return [{"key": f"{-key:016x}", **json.loads(text)} for key, text in sorted(self._heap, reverse=True)]


class Account:
    """Collects the account of all stages over one part; `begin`, called in the worker, opens its lists of removals."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.source = SourceAccount()
        self.stages: dict[str, StageAccount] = {}
        self.samples, self.little = Samples(), Samples()
        self._removed: IO[bytes] | None = None
        self._quarantine: TextIO | None = None

    def begin(self, directory: Path) -> None:
        """Starts the account of a part, with its files in `directory`."""
        self.source, self.stages = SourceAccount(), {}
        self.samples, self.little = Samples(), Samples()
        self._removed = zstandard.ZstdCompressor().stream_writer((directory / REMOVED).open("wb"), closefd=True)
        self._quarantine = cast(TextIO, (directory / QUARANTINED).open("w", encoding="utf-8", newline="\n"))

    def close(self) -> None:
        """Closes the files; may be called again."""
        for file in (self._removed, self._quarantine):
            if file is not None:
                file.close()
        self._removed = self._quarantine = None

    def as_record(self) -> dict[str, Any]:
        """Everything recorded since `begin`, as JSON."""
        return {
            "source": self.source.as_record(),
            "stages": {name: account.as_record() for name, account in sorted(self.stages.items())},
            "samples": self.samples.as_record(),
            "little": self.little.as_record(),
        }

    def file(self, source: str, num_bytes: int, text_bytes: int, *, is_first: bool = True) -> None:
        """Records that a file, or with not `is_first` another span of it, of this size gave so much text."""
        suffix = PurePath(source).suffix.lower()
        found = self.source.formats.setdefault(suffix, {"files": 0, "bytes": 0, "text_bytes": 0})
        found["files"] += is_first
        found["bytes"] += num_bytes
        found["text_bytes"] += text_bytes
        if num_bytes >= LEAST_JUDGED_BYTES:
            share = min(text_bytes * _SHARES // num_bytes, _SHARES)
            if share < LITTLE_SHARE * _SHARES:
                record = {"file": source, "bytes": num_bytes, "text_bytes": text_bytes}
                self.little.offer(f"{share:016x}", record)

    def stage(self, stage: str) -> StageAccount:
        """The account of a stage, made if there is none."""
        return self.stages.setdefault(stage, StageAccount())

    def removed(self, stage: str, document: Draft, reason: str, detail: str = "") -> None:
        """Records that `stage` removed the document."""
        account, num_bytes = self.stage(stage), utf8_length(document.text)
        account.removed[reason] += 1
        account.removed_bytes[reason] += num_bytes
        source, part = document.source, document.part
        why = {"stage": stage, "reason": reason, "detail": detail}
        record = {"file": source, "part": part, "place": document.place, **why, "bytes": num_bytes}
        if self._removed is not None:
            self._removed.write(json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n")
        # A hexadecimal number that orders documents at random, the same way in every build.
        key = f"{self.seed}\0{source}\0{part}".encode("utf-8", "surrogatepass")
        sample = {**record, "excerpt": document.text[:EXCERPT_CHARACTERS]}
        self.samples.offer(hashlib.blake2b(key, digest_size=8).hexdigest(), sample)

    def changed(self, stage: str, before: str, after: str, counts: Any) -> None:
        """Records that `stage` changed the text of a document, with the number of changes by name."""
        account = self.stage(stage)
        account.changed_documents += 1
        account.added_bytes += utf8_length(after) - utf8_length(before)
        account.changes.update(counts)

    def quarantine(self, record: dict[str, str]) -> None:
        """Writes a line about a file, or a place in one, that could not be used."""
        if self._quarantine is not None:
            self._quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")


REMOVED, QUARANTINED = "removed.jsonl.zst", "quarantine.jsonl"


def utf8_length(text: str) -> int:
    """The length of `text` in UTF-8 bytes; constant time for ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))
