"""Equal and nearly equal documents among all parts: which go, and for which documents that stay."""

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
from sheepop.data.duplicates.on_disk import ExternalSort, Rows, array_on_disk
from sheepop.data.duplicates.shingles import Hashes
from sheepop.data.duplicates.signatures import ID, PartSignatures, compared_shingles, numbered_blocks
from sheepop.data.duplicates.similar_pairs import Ranking, similar_pairs

DEFAULT_MEMORY_BYTES = 2**29
_BATCH = 2**12
_EXACT, _NEAR = 0, 1

ReadPart = Callable[[int], Iterator[Document]]


@dataclass(frozen=True, slots=True)
class Removed:
    """A document that goes: document `index` of part `part`, because of another one and how similar they are.

    The other document of an ``exact`` copy is the first with this text; it may go itself as ``near`` to a third, as its
    own entry then says. That of a ``near`` copy stays.
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
    """Every document that goes, in the order of parts and documents.

    The order of the parts counts, and protected ones must come first; where documents are cut into parts makes no
    difference. Of equal documents the first stays (with `exact`); then, with `near`, a document goes when its Jaccard
    similarity with a better one that stays is at least the threshold. ``read_part(number)`` reads a part again.
    `workspace` is emptied before and removed after; a decision that was stopped is simply made again.

    Memory holds about `memory_bytes`, the largest documents, and one byte for each document.
    """
    _check(parts, near)
    console = console or Console.silent()
    remove_tree(workspace)
    # Of the sorts that are open at a time, two at most sort; the others hold a quarter of their share.
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


def _check(parts: Sequence[PartSignatures], near: NearDuplicatesConfig | None) -> None:
    protected = [part.protected for part in parts]
    if protected != sorted(protected, reverse=True):
        raise ValueError("protected parts must come before all others")
    if near and any(part.num_bands != near.bands for part in parts):
        raise ValueError("all parts must have signatures of the settings under which they are compared")


def _entries(rows: Rows, similarities: NDArray[np.float64], reason: int) -> Rows:
    """Rows (ordinal, ordinal of the one because of which it goes, similarity, reason)."""
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
    """Every document whose text stands earlier: rows of its ordinal and that of the first with this text, ascending.

    Close what is returned.
    """
    copies = ExternalSort(directory / "copies", 2, memory_bytes=memory_bytes)
    with ExternalSort(directory / "ids", 3, memory_bytes=memory_bytes) as by_id:
        for _, start, ids in numbered_blocks(parts, *ID):
            by_id.add(np.column_stack([ids.T, np.arange(start, start + ids.shape[1], dtype=np.uint64)]))
        for rows in _copies_of_firsts(by_id.blocks()):
            copies.add(rows)
    return copies


def _copies_of_firsts(blocks: Iterator[Rows]) -> Iterator[Rows]:
    """From rows (id, id, ordinal) in order, rows (ordinal, ordinal of the first row with the same id)."""
    before: Rows = np.empty((0, 3), np.uint64)
    for block in blocks:
        # The first row of an id that goes on in the next block is carried over.
        rows = np.concatenate([before, block])
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
        firsts = rows[new][np.cumsum(new) - 1, 2]
        yield np.column_stack([rows[~new, 2], firsts[~new]])
        before = rows[new][-1:]


def _near_copies(
    pairs: ExternalSort,
    parts: Sequence[PartSignatures],
    read_part: ReadPart,
    ranking: Ranking,
    near: NearDuplicatesConfig,
    directory: Path,
    console: Console,
) -> Iterator[tuple[int, int, float]]:
    """(rank, rank of the best document that stays and is similar enough, their similarity) of every one that goes.

    Documents are gone through from the best to the worst. One goes when it is similar enough to a document that stays;
    else it stays. So nothing goes for a chain of likenesses: whatever goes has a document left behind that it is nearly
    equal to, which joining connected components would not grant.

    `pairs` are rows of the worse and the better rank. Since they come by the worse document, what becomes of the better
    one is settled when it matters; pairs with a document that went, or of one whose fate is settled, are not compared.
    """
    wanted = array_on_disk(directory / "wanted", ranking.ranks.size, np.bool_)
    for rows in pairs.blocks():
        wanted[ranking.ordinals[rows]] = True
    # The place and size of the set of each rank among the shingles of all, which stand one set behind the other.
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
    """The documents that occur in pairs with their ordinals; parts without such documents are not read."""
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
    """The Jaccard similarity of two sets given as distinct numbers: how many are in both, over how many there are."""
    together = np.concatenate([first, second])
    # A stable sort recognises the two ascending runs and merges them.
    together.sort(kind="stable")
    shared = int(np.count_nonzero(together[1:] == together[:-1]))
    union = together.size - shared
    return shared / union if union else 1.0
