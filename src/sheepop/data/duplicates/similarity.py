"""The exact similarity of two documents: those of the pairs are read again, and their shingles kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Progress
from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.on_disk import ExternalSort, array_on_disk
from sheepop.data.duplicates.ranking import Ranking
from sheepop.data.duplicates.shingles import Hashes
from sheepop.data.duplicates.signature_files import ID, PartSignatures
from sheepop.data.duplicates.signatures import compared_shingles

ReadPart = Callable[[int], Iterator[Document]]


def jaccard(first: Hashes, second: Hashes) -> float:
    """The Jaccard similarity of two sets given as distinct numbers: how many are in both, over how many there are."""
    together = np.concatenate([first, second])
    # A stable sort recognises the two ascending runs and merges them.
    together.sort(kind="stable")
    shared = int(np.count_nonzero(together[1:] == together[:-1]))
    union = together.size - shared
    return shared / union if union else 1.0


@dataclass(frozen=True, slots=True)
class ShingleSets:
    """The shingles of documents, one set behind the other, and the place and size of that of each rank; both in files.

    `places` is ``(ranks, 2)``.
    """

    places: NDArray[np.uint64]
    shingles: Hashes

    def similarity(self, first: int, second: int) -> float:
        """The Jaccard similarity of the documents of two ranks."""
        return jaccard(self._set(first), self._set(second))

    def _set(self, rank: int) -> Hashes:
        start, size = self.places[rank].tolist()
        return self.shingles[start : start + size]


def read_compared(
    pairs: ExternalSort,
    parts: Sequence[PartSignatures],
    read_part: ReadPart,
    ranking: Ranking,
    config: NearDuplicatesConfig,
    directory: Path,
    progress: Progress | None = None,
) -> ShingleSets:
    """Reads every document that occurs in `pairs`, part by part in order, and stores its shingles.

    ``read_part(number)`` gives the documents of a part as they were when their signatures were made; parts without
    such documents are not read. Raises `DataError` when a part has other documents now.
    """
    wanted = array_on_disk(directory / "wanted", ranking.ranks.size, np.bool_)
    for rows in pairs.blocks():
        wanted[ranking.ordinals[rows]] = True
    places = array_on_disk(directory / "places", 2 * ranking.num_ranked).reshape(-1, 2)
    path, size = directory / "shingles", 0
    with storage_errors(path), path.open("wb") as file:
        for ordinal, document in _wanted_documents(wanted, parts, read_part, progress):
            shingles = compared_shingles(document.text, document.kind, config)
            places[ranking.ranks[ordinal]] = size, shingles.size
            file.write(shingles.data)
            size += shingles.size
    return ShingleSets(places, np.asarray(np.memmap(path, np.uint64, "r")) if size else np.empty(0, np.uint64))


def _wanted_documents(
    wanted: NDArray[np.bool_], parts: Sequence[PartSignatures], read_part: ReadPart, progress: Progress | None
) -> Iterator[tuple[int, Document]]:
    start = 0
    for number, part in enumerate(parts):
        first, documents = start, None
        for ids in part.blocks(ID.start, ID.stop):
            for place in np.flatnonzero(wanted[start : start + ids.shape[1]]).tolist():
                documents = documents or enumerate(read_part(number), first)
                document = next((document for ordinal, document in documents if ordinal == start + place), None)
                high, low = ids[:, place].tolist()
                if document is None or document.id != f"{high:016x}{low:016x}":
                    raise DataError(f"{part.path} does not match the documents of its part. Build again.")
                yield start + place, document
            start += ids.shape[1]
        if progress:
            progress.advance(part.num_documents)
