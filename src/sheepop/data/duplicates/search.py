"""Finds equal and nearly equal documents among all parts, and decides which to remove.

Documents that agree in a whole band of their signatures are candidates (Indyk and Motwani 1998, "Approximate nearest
neighbors"). An external sort of every band makes them adjacent, for any number of documents.

Documents that agree in a band form a bucket, best first. Each is paired with the `REPRESENTATIVES` best of its bucket
and with the `NEIGHBOURS` just before it, which are closest in length (the sorted neighbourhood of Hernandez and Stolfo
1995). So a bucket of up to REPRESENTATIVES + NEIGHBOURS + 1 documents has all its pairs, and the pairs of a larger one
grow linearly with its size, not quadratically. This loses little: a document is removed because of a better one that
is kept, the best of a bucket are the most likely to be kept, and a pair left out of a large bucket usually meets in
another band, where the bucket has other documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Console, Progress
from sheepop.core.errors import DataError
from sheepop.core.files import remove_tree, storage_errors
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.on_disk import ExternalSort, Rows, are_new, array_on_disk
from sheepop.data.duplicates.shingles import Hashes
from sheepop.data.duplicates.signatures import (
    FIRST_BAND,
    ID,
    NUM_BYTES,
    NUM_SHINGLES,
    PartSignatures,
    compared_shingles,
    numbered_blocks,
)

DEFAULT_MEMORY_BYTES = 2**29
_BATCH = 2**12
_EXACT, _NEAR = 0, 1
REPRESENTATIVES = 16
NEIGHBOURS = 16
UNRANKED = np.uint64(2**64 - 1)
_LONGEST = np.uint64(2**63)
# Rows of a band are (hash, rank, number of shingles).
_HASH, _RANK = 0, 1

ReadPart = Callable[[int], Iterator[Document]]


@dataclass(frozen=True, slots=True)
class Removed:
    """The removal of document `index` of part `part`, with the document that it duplicates and their similarity.

    For an ``exact`` copy that is the first document with this text, which may itself be removed as ``near`` to a third;
    for a ``near`` copy it is a document that stays.
    """

    part: int
    index: int
    reason: Literal["exact", "near"]
    kept_part: int
    kept_index: int
    similarity: float


def find_duplicates(
    parts: Sequence[PartSignatures],
    read_part: ReadPart,
    near: NearDuplicatesConfig | None,
    workspace: Path,
    *,
    exact: bool = True,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    console: Console | None = None,
) -> Iterator[Removed]:
    """Yields every document to remove, in the order of parts and documents.

    The order of the parts matters, and protected ones must come first. With `exact`, the first of equal documents
    stays. Then, with `near`, a document is removed if its Jaccard similarity with a better one that stays is at least
    the threshold. ``read_part(number)`` reads a part again. `workspace` is emptied before and removed after. Uses about
    `memory_bytes` of memory, plus the largest documents and one byte per document.
    """
    protected = [part.protected for part in parts]
    if protected != sorted(protected, reverse=True):
        raise ValueError("protected parts must come before all others")
    if near and any(part.num_bands != near.bands for part in parts):
        raise ValueError("all parts must have signatures of the settings under which they are compared")
    console = console or Console.silent()
    remove_tree(workspace)
    # At most two of the open sorts are sorting at a time; the others hold a quarter of their share.
    share = memory_bytes // 3
    num_protected = sum(part.num_documents for part in parts if part.protected)
    try:
        with ExitStack() as stack:
            removed = stack.enter_context(ExternalSort(workspace / "removed", 4, memory_bytes=memory_bytes))
            copies = stack.enter_context(later_copies(parts, workspace, memory_bytes=share)) if exact else None
            for rows in copies.blocks() if copies else ():
                rows = rows[rows[:, 0] >= num_protected]
                removed.add(_entries(rows, np.ones(len(rows)), _EXACT))
            if near:
                ranking = Ranking(parts, copies, workspace, memory_bytes=share)
                with console.progress("Finding near duplicates", near.bands, "bands") as progress:
                    pairs = similar_pairs(
                        parts, ranking, near.threshold, workspace, memory_bytes=share, progress=progress
                    )
                with pairs:
                    found = _near_copies(pairs, parts, read_part, ranking, near, workspace, console)
                    while batch := list(islice(found, _BATCH)):
                        ranks = np.array([pair for *pair, _ in batch], np.uint64)
                        similarities = np.array([similarity for *_, similarity in batch])
                        removed.add(_entries(ranking.ordinals[ranks], similarities, _NEAR))
            yield from _named(removed, parts)
    finally:
        remove_tree(workspace)


def _entries(rows: Rows, similarities: NDArray[np.float64], reason: int) -> Rows:
    """Rows (ordinal, ordinal of the document that it duplicates, similarity, reason)."""
    return np.column_stack([rows, similarities.view(np.uint64), np.full(len(rows), reason, np.uint64)])


def _named(removed: ExternalSort, parts: Sequence[PartSignatures]) -> Iterator[Removed]:
    starts = np.cumsum([0, *(part.num_documents for part in parts)])
    for rows in removed.blocks():
        ordinals = rows[:, :2].astype(np.int64)
        numbers = np.searchsorted(starts, ordinals, "right") - 1
        places = (ordinals - starts[numbers]).tolist()
        similarities = np.ascontiguousarray(rows[:, 2]).view(np.float64).tolist()
        for (part, kept_part), (index, kept_index), similarity, reason in zip(
            numbers.tolist(), places, similarities, rows[:, 3].tolist(), strict=True
        ):
            yield Removed(part, index, "near" if reason == _NEAR else "exact", kept_part, kept_index, similarity)


def later_copies(parts: Sequence[PartSignatures], directory: Path, *, memory_bytes: int) -> ExternalSort:
    """Rows of the ordinals of each repeated document and of the first with its text, for the caller to close."""
    copies = ExternalSort(directory / "copies", 2, memory_bytes=memory_bytes)
    with ExternalSort(directory / "ids", 3, memory_bytes=memory_bytes) as by_id:
        for _, start, ids in numbered_blocks(parts, *ID):
            by_id.add(np.column_stack([ids.T, np.arange(start, start + ids.shape[1], dtype=np.uint64)]))
        before: Rows = np.empty((0, 3), np.uint64)
        for block in by_id.blocks():
            # Carries over the first row of the last id, which may continue in the next block.
            rows = np.concatenate([before, block])
            new = are_new(rows[:, :2])
            firsts = rows[new][np.cumsum(new) - 1, 2]
            copies.add(np.column_stack([rows[~new, 2], firsts[~new]]))
            before = rows[new][-1:]
    return copies


class Ranking:
    """Ranks the documents to compare from best to worst, in files.

    Documents of protected parts come first, in order; then longer ones (UTF-8 bytes) before shorter ones, ties in
    order. `ranks` maps ordinals to ranks, `ordinals` maps ranks to ordinals; the first `num_protected` ranks are
    protected. Documents without shingles and those in the first column of `copies` are `UNRANKED`.
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
    """The distinct pairs to compare: rows of the ranks of the worse and the better document, ascending.

    Leaves out pairs of protected documents, and pairs whose numbers of shingles differ so much that their Jaccard
    similarity must be below `threshold`. The caller closes the returned sort.
    """
    pairs = ExternalSort(directory / "pairs", 2, memory_bytes=memory_bytes, unique=True)
    for band in range(parts[0].num_bands if parts else 0):
        with ExternalSort(directory / f"band-{band}", 3, memory_bytes=memory_bytes) as by_hash:
            for _, start, (num_shingles, hashes) in numbered_blocks(parts, NUM_SHINGLES, FIRST_BAND + band):
                ranks = ranking.ranks[start : start + hashes.size]
                by_hash.add(np.column_stack([hashes, ranks, num_shingles])[ranks != UNRANKED])
            for worse, better in _pairs_in_buckets(by_hash.blocks()):
                sizes = worse[:, 1], better[:, 1]
                # The similarity is highest if the larger set contains the smaller one.
                may_reach = np.minimum(*sizes) / np.maximum(*sizes) >= threshold
                possible = (worse[:, 0] >= ranking.num_protected) & may_reach
                pairs.add(np.column_stack([worse[possible, 0], better[possible, 0]]))
        if progress:
            progress.advance()
    return pairs


def _pairs_in_buckets(blocks: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Yields pairs of arrays for the worse and the better documents, with rows (rank, number of shingles)."""
    known: Rows = np.empty((0, 3), np.uint64)
    for block in blocks:
        rows = np.concatenate([known, block])
        yield from _new_pairs(rows, len(known))
        # If the last bucket continues, its next documents need its best and its last ones.
        known = rows[np.searchsorted(rows[:, _HASH], rows[-1, _HASH], "left") :]
        if len(known) > REPRESENTATIVES + NEIGHBOURS:
            known = np.concatenate([known[:REPRESENTATIVES], known[-NEIGHBOURS:]])


def _new_pairs(rows: Rows, num_known: int) -> Iterator[tuple[Rows, Rows]]:
    """Yields the pairs whose worse row is not among the first `num_known`, which were paired before."""
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


def _near_copies(
    pairs: ExternalSort,
    parts: Sequence[PartSignatures],
    read_part: ReadPart,
    ranking: Ranking,
    near: NearDuplicatesConfig,
    directory: Path,
    console: Console,
) -> Iterator[tuple[int, int, float]]:
    """Yields (rank, rank of the best similar document that stays, similarity) for every document to remove.

    Goes through the documents from best to worst and removes one if it is similar enough to a document that stays; a
    chain of similar documents, as in connected components, is not enough. `pairs` are rows of the worse and the better
    rank; as they are sorted by the worse one, the fate of the better one is known by then.
    """
    wanted = array_on_disk(directory / "wanted", ranking.ranks.size, np.bool_)
    for rows in pairs.blocks():
        wanted[ranking.ordinals[rows]] = True
    # The offset and size of each rank's shingles in the file, which holds the sets end to end.
    places = array_on_disk(directory / "places", 2 * ranking.ordinals.size).reshape(-1, 2)
    path, size = directory / "shingles", 0
    with (
        console.progress("Reading candidates", ranking.ranks.size, "documents") as progress,
        storage_errors(path),
        path.open("wb") as file,
    ):
        for ordinal, document in _wanted_documents(wanted, parts, read_part, progress):
            compared = compared_shingles(document.text, document.kind, near)
            places[ranking.ranks[ordinal]] = size, compared.size
            file.write(compared.data)
            size += compared.size
    shingles = np.asarray(np.memmap(path, np.uint64, "r")) if size else np.empty(0, np.uint64)
    gone = bytearray(ranking.ordinals.size)
    with console.progress("Comparing candidates", None, "pairs") as progress:
        for rows in pairs.blocks():
            for worse, better in rows.tolist():
                if gone[worse] or gone[better]:
                    continue
                first, second = (shingles[start : start + size] for start, size in places[[worse, better]].tolist())
                similarity = jaccard(first, second)
                if similarity >= near.threshold:
                    gone[worse] = True
                    yield worse, better, similarity
            progress.advance(len(rows))


def _wanted_documents(
    wanted: NDArray[np.bool_], parts: Sequence[PartSignatures], read_part: ReadPart, progress: Progress
) -> Iterator[tuple[int, Document]]:
    """Yields the documents that occur in pairs with their ordinals; skips parts without any."""
    start = 0
    for number, part in enumerate(parts):
        first, documents = start, None
        for ids in part.blocks(*ID):
            for place in np.flatnonzero(wanted[start : start + ids.shape[1]]).tolist():
                documents = documents or enumerate(read_part(number), first)
                document = next((document for ordinal, document in documents if ordinal == start + place), None)
                high, low = ids[:, place].tolist()
                if document is None or document.id != f"{high:016x}{low:016x}":
                    raise DataError(f"{part.path} does not match the documents of its part. Build again.")
                yield start + place, document
            start += ids.shape[1]
        progress.advance(part.num_documents)


def jaccard(first: Hashes, second: Hashes) -> float:
    """The Jaccard similarity of two sets, given as sorted distinct numbers: intersection size over union size."""
    together = np.concatenate([first, second])
    # A stable sort recognises the two ascending runs and merges them.
    together.sort(kind="stable")
    shared = int(np.count_nonzero(together[1:] == together[:-1]))
    union = together.size - shared
    return shared / union if union else 1.0
