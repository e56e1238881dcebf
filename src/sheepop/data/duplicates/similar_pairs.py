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
from sheepop.data.duplicates.on_disk import ExternalSort, Rows
from sheepop.data.duplicates.ranking import UNRANKED, Ranking
from sheepop.data.duplicates.signature_files import FIRST_BAND, NUM_SHINGLES, PartSignatures

REPRESENTATIVES = 16
NEIGHBOURS = 16
_HASH, _RANK, _SHINGLES = range(3)


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
            for rows in _band_rows(parts, ranking, band):
                by_hash.add(rows)
            for worse, better in _pairs_in_buckets(by_hash.blocks()):
                possible = (worse[:, 0] >= ranking.num_protected) & _may_reach(threshold, worse[:, 1], better[:, 1])
                pairs.add(np.column_stack([worse[possible, 0], better[possible, 0]]))
        if progress:
            progress.advance()
    return pairs


def _band_rows(parts: Sequence[PartSignatures], ranking: Ranking, band: int) -> Iterator[Rows]:
    """Rows (hash in this band, rank, number of shingles) of all documents that have a rank."""
    start, column = 0, FIRST_BAND + band
    for part in parts:
        blocks = zip(part.blocks(NUM_SHINGLES, NUM_SHINGLES + 1), part.blocks(column, column + 1), strict=True)
        for (num_shingles,), (hashes,) in blocks:
            ranks = ranking.ranks[start : start + hashes.size]
            rows = np.column_stack([hashes, ranks, num_shingles])
            yield rows[ranks != UNRANKED]
            start += hashes.size


def _pairs_in_buckets(blocks: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of rows without their hash, (rank, number of shingles): the worse documents and the better ones."""
    context: Rows = np.empty((0, 3), np.uint64)
    for block in blocks:
        rows = np.concatenate([context, block])
        yield from _new_pairs(rows, len(context))
        context = _context(rows)


def _context(rows: Rows) -> Rows:
    """What must be known of the last bucket to go on with it: its best documents and its last ones."""
    start = int(np.searchsorted(rows[:, _HASH], rows[-1, _HASH], "left"))
    bucket = rows[start:]
    if len(bucket) <= REPRESENTATIVES + NEIGHBOURS:
        return bucket
    return np.concatenate([bucket[:REPRESENTATIVES], bucket[-NEIGHBOURS:]])


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
        yield _chosen(rows, worse, worse - distance)
    for place in range(REPRESENTATIVES):
        worse = worse[starts[worse] + place < worse - NEIGHBOURS]
        if not worse.size:
            return
        yield _chosen(rows, worse, starts[worse] + place)


def _chosen(rows: Rows, worse: NDArray[np.int64], better: NDArray[np.int64]) -> tuple[Rows, Rows]:
    return rows[worse, _RANK:], rows[better, _RANK:]


def _may_reach(threshold: float, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether sets of these sizes can be that similar: at best the smaller lies within the larger."""
    possible: NDArray[np.bool_] = np.minimum(first, second) / np.maximum(first, second) >= threshold
    return possible
