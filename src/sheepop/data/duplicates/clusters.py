"""The decision among near duplicates: which documents stay, and for which of those each other one goes.

Documents are gone through from the best to the worst (`preference`). One goes when it is verified to be similar enough
to a document that stays; else it stays. So nothing goes for a chain of likenesses: whatever goes has a document left
behind that it is nearly equal to, which joining connected components would not grant.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sheepop.core.console import Progress
from sheepop.data.duplicates.sorting import ExternalSort
from sheepop.data.duplicates.verification import ShingleSets


def near_copies(
    pairs: ExternalSort,
    sets: ShingleSets,
    num_ranked: int,
    threshold: float,
    progress: Progress | None = None,
) -> Iterator[tuple[int, int, float]]:
    """(rank, rank of the best document that stays and is similar enough, their similarity) of every one that goes.

    `pairs` are rows of the worse and the better rank. Since they come by the worse document, what becomes of the better
    one is settled when it matters; pairs with a document that went, or of one whose fate is settled, are not compared.
    """
    gone = Flags(num_ranked)
    for rows in pairs.blocks():
        for worse, better in rows.tolist():
            if gone[worse] or gone[better]:
                continue
            similarity = sets.similarity(worse, better)
            if similarity >= threshold:
                gone.set(worse)
                yield worse, better, similarity
        if progress:
            progress.advance(len(rows))


class Flags:
    """One bit for each of `size` numbers, unset at first."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(-(-size // 8), np.uint8).data

    def __getitem__(self, number: int) -> bool:
        return bool(self._bytes[number >> 3] >> (number & 7) & 1)

    def set(self, number: int) -> None:
        """Sets the bit of a number."""
        self._bytes[number >> 3] |= 1 << (number & 7)
