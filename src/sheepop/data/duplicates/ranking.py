"""Which copy is better: documents in the order in which they are to be kept, each known by its rank.

Documents of protected parts come first, in their order; then longer ones before shorter ones (UTF-8 bytes); documents
of equal length in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.data.duplicates.on_disk import ExternalSort, array_on_disk
from sheepop.data.duplicates.signature_files import NUM_BYTES, NUM_SHINGLES, PartSignatures

UNRANKED = np.uint64(2**64 - 1)
_LONGEST = np.uint64(2**63)


class Ranking:
    """The ranks of all documents that are to be compared, in files; the better document has the smaller rank.

    `ranks` has that of each ordinal, `ordinals` that of each rank, and `num_protected` says how many documents of
    protected parts have one. Documents without shingles and those whose ordinals are the first column of `copies` have
    none: `UNRANKED`.
    """

    def __init__(
        self, parts: Sequence[PartSignatures], copies: ExternalSort | None, directory: Path, *, memory_bytes: int
    ) -> None:
        num_documents = sum(part.num_documents for part in parts)
        self.ranks: NDArray[np.uint64] = array_on_disk(directory / "ranks", num_documents)
        for rows in copies.blocks() if copies else ():
            self.ranks[rows[:, 0]] = UNRANKED
        with ExternalSort(directory / "by-preference", 2, memory_bytes=memory_bytes) as by_preference:
            self.num_protected, self.num_ranked = self._sort(parts, by_preference)
            self.ordinals: NDArray[np.uint64] = array_on_disk(directory / "ordinals", self.num_ranked)
            rank = 0
            for rows in by_preference.blocks():
                numbers = np.arange(rank, rank + len(rows), dtype=np.uint64)
                self.ordinals[rank : rank + len(rows)] = rows[:, 1]
                self.ranks[rows[:, 1]] = numbers
                rank += len(rows)

    def _sort(self, parts: Sequence[PartSignatures], by_preference: ExternalSort) -> tuple[int, int]:
        """Sorts the documents to compare by (what is preferred, ordinal).

        Returns how many are protected, and how many there are.
        """
        start = num_protected = num_ranked = 0
        for part in parts:
            for lengths, num_shingles in part.blocks(NUM_BYTES, NUM_SHINGLES + 1):
                ranks = self.ranks[start : start + lengths.size]
                ranks[num_shingles == 0] = UNRANKED
                places = np.flatnonzero(ranks != UNRANKED)
                keys = np.zeros(places.size, np.uint64) if part.protected else _LONGEST - lengths[places]
                by_preference.add(np.column_stack([keys, np.uint64(start) + places.astype(np.uint64)]))
                num_ranked += places.size
                num_protected += places.size if part.protected else 0
                start += lengths.size
        return num_protected, num_ranked
