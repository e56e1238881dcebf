"""The order of the corpus, made by two passes that never hold more than one file's worth of documents.

`Scatter` reads a part and writes its documents grouped by the bucket they belong to; `Gather` collects one bucket
from all parts, sorts it by key and writes a file of the corpus. Buckets are ranges of keys, so one after the other
they are the whole corpus in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.files import write_json
from sheepop.data.clean.ledger import Ledger
from sheepop.data.documents import DocumentWriter, StoredDocument
from sheepop.data.pipeline.assignment import SPLITS, Assignment, Placed
from sheepop.data.pipeline.contents import Contents
from sheepop.data.pipeline.parts import ACCOUNT, FinishedPart, part_path
from sheepop.data.pipeline.removals import read_removals

DOCUMENTS_PREFIX = "documents"
_CHUNK_BYTES = 2**26
_KEY_LENGTH = 20
_OFFSET = np.dtype("<i8")


@dataclass(frozen=True)
class Scatter:
    """Work on part `rank` of the pass in `source`: its kept documents, grouped by bucket."""

    source: Path
    removals: Path | None
    assignment: Assignment
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes ``chunk-N.bin``, each with the documents of every bucket together, and the offsets of the buckets."""
        ledger = Ledger(self.seed)
        ledger.begin(staging)
        with closing(ledger), closing(_Chunks(staging, sum(self.assignment.buckets))) as chunks:
            record = self._scatter(rank, ledger, chunks)
        write_json(staging / ACCOUNT, {**ledger.as_record(), **record, "source": None})

    def _scatter(self, rank: int, ledger: Ledger, chunks: _Chunks) -> dict[str, Any]:
        """Places the documents of part `rank`; the account of what went where."""
        splits = {name: {"documents": 0, "bytes": 0, "occurrences": 0, "occurring_bytes": 0} for name in SPLITS}
        mixed_counts: dict[int, list[int]] = {}
        for mixed, split, document, occurrences in self.assignment.place(rank, self._kept(rank, ledger)):
            counts = splits[split]
            counts["documents"] += 1
            counts["bytes"] += document.num_bytes
            counts["occurrences"] += len(occurrences)
            counts["occurring_bytes"] += len(occurrences) * document.num_bytes
            if split == "train":
                entry = mixed_counts.setdefault(mixed, [0, 0, 0])
                entry[0] += 1
                entry[1] += document.num_bytes
                entry[2] += len(occurrences) * document.num_bytes
            for placed in occurrences:
                chunks.add(placed)
        mixed_record = {str(number): counts for number, counts in sorted(mixed_counts.items())}
        return {"splits": splits, "mixed": mixed_record, "cut_documents": self.assignment.splitter.cut_documents}

    def _kept(self, rank: int, ledger: Ledger) -> Iterator[tuple[StoredDocument, int]]:
        removals = read_removals(self.removals, rank)
        part = FinishedPart(part_path(self.source, rank))
        mixed = part.mixed().tolist()
        for index, stored in enumerate(part.documents()):
            removal = removals.get(index)
            if removal is None:
                yield stored, mixed[index]
            else:
                ledger.removed(removal.stage, stored.document().draft(), removal.reason, removal.detail)


class _Chunks:
    """Collects occurrences and writes them, grouped by bucket, whenever enough are held."""

    def __init__(self, directory: Path, num_buckets: int) -> None:
        self._directory, self._num_buckets = directory, num_buckets
        self._held: list[Placed] = []
        self._size = self._written = 0
        self._offsets = (directory / "offsets.bin").open("wb")

    def add(self, placed: Placed) -> None:
        self._held.append(placed)
        self._size += len(placed.document.line)
        if self._size >= _CHUNK_BYTES:
            self._flush()

    def close(self) -> None:
        if self._held:
            self._flush()
        self._offsets.close()

    def _flush(self) -> None:
        ends = np.zeros(self._num_buckets + 1, _OFFSET)
        with (self._directory / f"chunk-{self._written:05d}.bin").open("wb") as file:
            for placed in sorted(self._held, key=lambda placed: placed.bucket):
                ends[placed.bucket + 1] += file.write(placed.key + placed.document.line)
        self._offsets.write(np.cumsum(ends, dtype=_OFFSET).tobytes())
        self._written += 1
        self._held, self._size = [], 0


@dataclass(frozen=True)
class Gather:
    """Work on bucket `rank`: its documents from all parts that `Scatter` left in `source`, in the order of keys."""

    source: Path
    num_parts: int
    num_buckets: int
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes the bucket's documents and an account of what they are."""
        lines = sorted(line for number in range(self.num_parts) for line in self._lines(number, rank))
        contents = Contents(self.seed)
        with DocumentWriter(staging, DOCUMENTS_PREFIX, file_bytes=2**62) as writer:
            for line in lines:
                stored = StoredDocument.from_line(line[_KEY_LENGTH:])
                writer.write(stored)
                contents.add(stored.document())
        write_json(staging / ACCOUNT, contents.as_record())

    def _lines(self, number: int, bucket: int) -> Iterator[bytes]:
        directory = part_path(self.source, number)
        offsets = _offsets(directory, self.num_buckets)
        for chunk, (start, stop) in enumerate(offsets[:, bucket : bucket + 2].tolist()):
            if stop > start:
                with (directory / f"chunk-{chunk:05d}.bin").open("rb") as file:
                    file.seek(start)
                    yield from file.read(stop - start).splitlines(keepends=True)


def _offsets(directory: Path, num_buckets: int) -> NDArray[np.int64]:
    """Where each bucket begins in each chunk of a part, ``(chunks, buckets + 1)``."""
    path = directory / "offsets.bin"
    if path.stat().st_size == 0:
        return np.zeros((0, num_buckets + 1), np.int64)
    return np.memmap(path, dtype=_OFFSET, mode="r").reshape(-1, num_buckets + 1)
