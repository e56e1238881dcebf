"""Pairs of documents worth comparing: those that agree in a whole band of their signatures.

Indyk and Motwani 1998, "Approximate nearest neighbors". Every band is sorted by external sort, so the documents that
agree stand together, whatever their number.

Documents that agree in a band are a bucket, best first. Each is paired with the `REPRESENTATIVES` best of its bucket
and with the `NEIGHBOURS` just before it, which are nearest in length (the sorted neighbourhood of Hernandez and Stolfo
1995). So a bucket of up to REPRESENTATIVES + NEIGHBOURS + 1 documents has all its pairs, and in a larger one their
number grows with its size, not with the square of it. Little is lost: whether a document goes depends on a better one
that is kept; the best of a bucket are the likeliest to be kept; and a pair that a crowded bucket leaves out mostly
meets in another band, where the crowd is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Progress
from sheepop.data.duplicates.on_disk import ExternalSort, Rows, array_on_disk
from sheepop.data.duplicates.signatures import (
    FIRST_BAND,
    NUM_BYTES,
    NUM_SHINGLES,
    PartSignatures,
    numbered_blocks,
)

REPRESENTATIVES = 16
NEIGHBOURS = 16
UNRANKED = np.uint64(2**64 - 1)
_LONGEST = np.uint64(2**63)
# Rows of a band are (hash, rank, number of shingles).
_HASH, _RANK = 0, 1


class Ranking:
    """The documents to compare in the order in which they are to be kept, each known by its rank; in files.

    Those of protected parts come first, in their order; then longer ones before shorter ones (UTF-8 bytes); documents
    of equal length in their order. `ranks` has the rank of each ordinal, `ordinals` the ordinal of each rank, and
    `num_protected` says how many documents of protected parts have one. Documents without shingles and those whose
    ordinals are the first column of `copies` have none: `UNRANKED`.
    """

    def __init__(
        self, parts: Sequence[PartSignatures], copies: ExternalSort | None, directory: Path, *, memory_bytes: int
    ) -> None:
        num_documents = sum(part.num_documents for part in parts)
        self.ranks: NDArray[np.uint64] = array_on_disk(directory / "ranks", num_documents)
        for rows in copies.blocks() if copies else ():
            self.ranks[rows[:, 0]] = UNRANKED
        rank = self.num_protected = 0
        with ExternalSort(directory / "by-preference", 2, memory_bytes=memory_bytes) as by_preference:
            for part, start, (lengths, num_shingles) in numbered_blocks(parts, NUM_BYTES, NUM_SHINGLES):
                ranks = self.ranks[start : start + lengths.size]
                ranks[num_shingles == 0] = UNRANKED
                places = np.flatnonzero(ranks != UNRANKED)
                keys = np.zeros(places.size, np.uint64) if part.protected else _LONGEST - lengths[places]
                by_preference.add(np.column_stack([keys, np.uint64(start) + places.astype(np.uint64)]))
                rank += places.size
                self.num_protected += places.size if part.protected else 0
            self.ordinals: NDArray[np.uint64] = array_on_disk(directory / "ordinals", rank)
            rank = 0
            for rows in by_preference.blocks():
                self.ordinals[rank : rank + len(rows)] = rows[:, 1]
                self.ranks[rows[:, 1]] = np.arange(rank, rank + len(rows), dtype=np.uint64)
                rank += len(rows)


def similar_pairs(
    parts: Sequence[PartSignatures],
    ranking: Ranking,
    threshold: float,
    directory: Path,
    *,
    memory_bytes: int,
    progress: Progress | None = None,
) -> ExternalSort:
    """The pairs to compare, each once: rows of the ranks of the worse and the better document, ascending.

    Left out are pairs of protected documents, and pairs whose numbers of shingles differ so much that their Jaccard
    similarity must be below `threshold`. Close what is returned.
    """
    pairs = ExternalSort(directory / "pairs", 2, memory_bytes=memory_bytes, unique=True)
    for band in range(parts[0].num_bands if parts else 0):
        with ExternalSort(directory / f"band-{band}", 3, memory_bytes=memory_bytes) as by_hash:
            for _, start, (num_shingles, hashes) in numbered_blocks(parts, NUM_SHINGLES, FIRST_BAND + band):
                ranks = ranking.ranks[start : start + hashes.size]
                by_hash.add(np.column_stack([hashes, ranks, num_shingles])[ranks != UNRANKED])
            for worse, better in _pairs_in_buckets(by_hash.blocks()):
                possible = (worse[:, 0] >= ranking.num_protected) & _may_reach(threshold, worse[:, 1], better[:, 1])
                pairs.add(np.column_stack([worse[possible, 0], better[possible, 0]]))
        if progress:
            progress.advance()
    return pairs


def _pairs_in_buckets(blocks: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of rows without their hash, (rank, number of shingles): the worse documents and the better ones."""
    known: Rows = np.empty((0, 3), np.uint64)
    for block in blocks:
        rows = np.concatenate([known, block])
        yield from _new_pairs(rows, len(known))
        # Of the last bucket its best documents and its last ones are needed to go on with it.
        known = rows[np.searchsorted(rows[:, _HASH], rows[-1, _HASH], "left") :]
        if len(known) > REPRESENTATIVES + NEIGHBOURS:
            known = np.concatenate([known[:REPRESENTATIVES], known[-NEIGHBOURS:]])


def _new_pairs(rows: Rows, num_known: int) -> Iterator[tuple[Rows, Rows]]:
    """The pairs whose worse row is not among the first `num_known`, which were paired before."""
    hashes = rows[:, _HASH]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = hashes[1:] != hashes[:-1]
    starts = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    worse = np.arange(num_known, len(rows))
    for distance in range(1, NEIGHBOURS + 1):
        worse = worse[worse - distance >= starts[worse]]
        if not worse.size:
            return
        yield rows[worse, _RANK:], rows[worse - distance, _RANK:]
    for place in range(REPRESENTATIVES):
        worse = worse[starts[worse] + place < worse - NEIGHBOURS]
        if not worse.size:
            return
        yield rows[worse, _RANK:], rows[starts[worse] + place, _RANK:]


def _may_reach(threshold: float, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether sets of these sizes can be that similar: at best the smaller lies within the larger."""
    possible: NDArray[np.bool_] = np.minimum(first, second) / np.maximum(first, second) >= threshold
    return possible
