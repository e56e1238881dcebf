"""Which copy is better: documents in the order in which they are to be kept, each known by its rank.

Documents of protected parts come first, in their order; then longer ones before shorter ones (UTF-8 bytes); documents
of equal length in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.data.duplicates.number_file import NumberFile
from sheepop.data.duplicates.signature_files import NUM_BYTES, NUM_SHINGLES, PartSignatures
from sheepop.data.duplicates.sorting import Cursor, ExternalSort

UNRANKED = np.uint64(2**64 - 1)
_LONGEST = np.uint64(2**63)


class Preference:
    """The ranks of all documents that are to be compared, on disk; the better document has the smaller rank.

    Documents without shingles and those whose ordinals are the first column of `copies` have none. Close it to remove
    its files.
    """

    def __init__(
        self, parts: Sequence[PartSignatures], copies: ExternalSort | None, directory: Path, *, memory_bytes: int
    ) -> None:
        self.ordinals = NumberFile(directory / "ordinals")
        self.ranks = NumberFile(directory / "ranks")
        self.num_protected = 0
        with ExternalSort(directory / "by-ordinal", 2, memory_bytes=memory_bytes) as by_ordinal:
            with ExternalSort(directory / "by-preference", 2, memory_bytes=memory_bytes) as by_preference:
                num_documents = self._compared(parts, copies, by_preference)
                self._number(by_preference, by_ordinal)
            self._write_ranks(by_ordinal, num_documents)

    @property
    def num_ranked(self) -> int:
        """How many documents have a rank: 0 to one less than this."""
        return self.ordinals.size

    def close(self) -> None:
        """Removes the files."""
        self.ordinals.close()
        self.ranks.close()

    def __enter__(self) -> Preference:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _compared(
        self, parts: Sequence[PartSignatures], copies: ExternalSort | None, by_preference: ExternalSort
    ) -> int:
        """Sorts the documents to compare by (what is preferred, ordinal); returns the number of all documents."""
        left_out = Cursor(copies.blocks() if copies else iter(()), 2)
        start = 0
        for part in parts:
            for lengths, num_shingles in part.blocks(NUM_BYTES, NUM_SHINGLES + 1):
                compared = num_shingles > 0
                for rows in left_out.take_below(start + lengths.size):
                    compared[rows[:, 0] - np.uint64(start)] = False
                ordinals = np.uint64(start) + np.flatnonzero(compared).astype(np.uint64)
                keys = np.zeros_like(ordinals) if part.protected else _LONGEST - lengths[compared]
                by_preference.add(np.column_stack([keys, ordinals]))
                self.num_protected += ordinals.size if part.protected else 0
                start += lengths.size
        return start

    def _number(self, by_preference: ExternalSort, by_ordinal: ExternalSort) -> None:
        for rows in by_preference.blocks():
            ranks = np.arange(self.ordinals.size, self.ordinals.size + len(rows), dtype=np.uint64)
            self.ordinals.append(rows[:, 1])
            by_ordinal.add(np.column_stack([rows[:, 1], ranks]))

    def _write_ranks(self, by_ordinal: ExternalSort, num_documents: int, window: int = 2**18) -> None:
        ranked = Cursor(by_ordinal.blocks(), 2)
        for start in range(0, num_documents, window):
            ranks = np.full(min(window, num_documents - start), UNRANKED)
            for rows in ranked.take_below(start + ranks.size):
                ranks[rows[:, 0] - np.uint64(start)] = rows[:, 1]
            self.ranks.append(ranks)

    def ordinals_of(self, ranks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The ordinals of documents with these ranks, in an array of the same shape."""
        distinct, places = np.unique(ranks, return_inverse=True)
        return self.ordinals.at(distinct)[places].reshape(ranks.shape)
