"""Candidates read again: their sets of shingles on disk, and the exact similarity of two of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sheepop.core.console import Progress
from sheepop.core.errors import DataError
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.number_file import NumberFile
from sheepop.data.duplicates.preference import Preference
from sheepop.data.duplicates.shingles import Hashes
from sheepop.data.duplicates.signature_files import ID, PartSignatures
from sheepop.data.duplicates.signatures import compared_shingles
from sheepop.data.duplicates.sorting import Cursor, ExternalSort

ReadPart = Callable[[int], Iterator[Document]]


def jaccard(first: Hashes, second: Hashes) -> float:
    """The Jaccard similarity of two sets given as distinct numbers: how many are in both, over how many there are."""
    together = np.concatenate([first, second])
    # A stable sort recognises the two ascending runs and merges them.
    together.sort(kind="stable")
    shared = int(np.count_nonzero(together[1:] == together[:-1]))
    union = together.size - shared
    return shared / union if union else 1.0


class ShingleSets:
    """The shingles of documents by rank, in files below `directory`; the last ones asked for stay in memory.

    Holds at most about `memory_bytes`, and the two largest sets. Close it to remove its files.
    """

    def __init__(self, directory: Path, *, memory_bytes: int) -> None:
        self._numbers = NumberFile(directory / "shingles")
        self._places = NumberFile(directory / "places")
        self._recent: OrderedDict[int, Hashes] = OrderedDict()
        self._memory_bytes, self._recent_bytes = memory_bytes, 0

    def add(self, rank: int, shingles: Hashes) -> None:
        """Stores the set of a document."""
        self._places.write(2 * rank, np.array([self._numbers.size, shingles.size], np.uint64))
        self._numbers.append(shingles)

    def similarity(self, first: int, second: int) -> float:
        """The Jaccard similarity of the documents of two ranks."""
        return jaccard(self._set(first), self._set(second))

    def close(self) -> None:
        """Removes the files."""
        self._numbers.close()
        self._places.close()

    def __enter__(self) -> ShingleSets:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _set(self, rank: int) -> Hashes:
        shingles = self._recent.get(rank)
        if shingles is None:
            start, size = self._places.read(2 * rank, 2).tolist()
            shingles = self._recent[rank] = self._numbers.read(start, size)
            self._recent_bytes += shingles.nbytes
            while self._recent_bytes > self._memory_bytes and len(self._recent) > 1:
                self._recent_bytes -= self._recent.popitem(last=False)[1].nbytes
        else:
            self._recent.move_to_end(rank)
        return shingles


def read_candidates(
    pairs: ExternalSort,
    parts: Sequence[PartSignatures],
    read_part: ReadPart,
    preference: Preference,
    config: NearDuplicatesConfig,
    directory: Path,
    *,
    memory_bytes: int,
    progress: Progress | None = None,
) -> ShingleSets:
    """Reads every document that occurs in `pairs`, part by part in order, and stores its shingles.

    ``read_part(number)`` gives the documents of a part as they were when their signatures were made; parts without
    candidates are not read. Raises `DataError` when a part has other documents now. Close what is returned.
    """
    sets = ShingleSets(directory / "sets", memory_bytes=memory_bytes)
    with _candidates(pairs, preference, directory, memory_bytes) as by_ordinal:
        wanted = Cursor(by_ordinal.blocks(), 2)
        start = 0
        for number, part in enumerate(parts):
            _read_part(number, start, part, wanted, read_part, config, sets)
            start += part.num_documents
            if progress:
                progress.advance(part.num_documents)
    return sets


def _candidates(pairs: ExternalSort, preference: Preference, directory: Path, memory_bytes: int) -> ExternalSort:
    """Rows (ordinal, rank) of every document that occurs in a pair, once, ascending."""
    by_ordinal = ExternalSort(directory / "candidates", 2, memory_bytes=memory_bytes)
    with ExternalSort(directory / "candidate-ranks", 1, memory_bytes=memory_bytes, unique=True) as by_rank:
        for rows in pairs.blocks():
            by_rank.add(np.unique(rows)[:, None])
        for rows in by_rank.blocks():
            by_ordinal.add(np.column_stack([preference.ordinals_of(rows[:, 0]), rows[:, 0]]))
    return by_ordinal


def _read_part(
    number: int,
    first: int,
    part: PartSignatures,
    wanted: Cursor,
    read_part: ReadPart,
    config: NearDuplicatesConfig,
    sets: ShingleSets,
) -> None:
    documents: Iterator[tuple[int, Document]] | None = None
    start = first
    for ids in part.blocks(ID.start, ID.stop):
        for rows in wanted.take_below(start + ids.shape[1]):
            for ordinal, rank in rows.tolist():
                documents = documents or enumerate(read_part(number), first)
                document = next((document for place, document in documents if place == ordinal), None)
                high, low = ids[:, ordinal - start].tolist()
                if document is None or document.id != f"{high:016x}{low:016x}":
                    raise DataError(f"{part.path} does not match the documents of its part. Build again.")
                sets.add(rank, compared_shingles(document.text, document.kind, config))
        start += ids.shape[1]
