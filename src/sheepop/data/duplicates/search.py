"""Equal and nearly equal documents among all parts: which go, and for which documents that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Console, Progress
from sheepop.core.files import remove_tree
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.on_disk import ExternalSort, Rows
from sheepop.data.duplicates.ranking import Ranking
from sheepop.data.duplicates.signature_files import ID, PartSignatures
from sheepop.data.duplicates.similar_pairs import similar_pairs
from sheepop.data.duplicates.similarity import ReadPart, ShingleSets, read_compared

DEFAULT_MEMORY_BYTES = 2**29
_BATCH = 2**12
_EXACT, _NEAR = 0, 1
_ORDINAL, _KEPT, _SIMILARITY, _REASON = range(4)


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
    remove_tree(workspace)
    # Of the sorts that are open at a time, two at most sort; the others hold a quarter of their share.
    work = _Decision(parts, workspace, memory_bytes // 3, console or Console.silent())
    try:
        with ExitStack() as stack:
            removed = stack.enter_context(ExternalSort(workspace / "removed", 4, memory_bytes=memory_bytes))
            copies = stack.enter_context(work.copies()) if exact else None
            if copies:
                work.add_exact(copies, removed)
            if near:
                work.add_near(near, copies, read_part, removed)
            yield from work.named(removed)
    finally:
        remove_tree(workspace)


def _check(parts: Sequence[PartSignatures], near: NearDuplicatesConfig | None) -> None:
    protected = [part.protected for part in parts]
    if protected != sorted(protected, reverse=True):
        raise ValueError("protected parts must come before all others")
    if near and any(part.num_bands != near.bands for part in parts):
        raise ValueError("all parts must have signatures of the settings under which they are compared")


class _Decision:
    def __init__(self, parts: Sequence[PartSignatures], workspace: Path, memory_bytes: int, console: Console) -> None:
        self._parts, self._workspace, self._memory_bytes, self._console = parts, workspace, memory_bytes, console
        sizes = np.array([part.num_documents for part in parts], dtype=np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._num_documents = int(sizes.sum())
        self._num_protected = int(sizes[[part.protected for part in parts]].sum())

    def copies(self) -> ExternalSort:
        return later_copies(self._parts, self._workspace, memory_bytes=self._memory_bytes)

    def add_exact(self, copies: ExternalSort, removed: ExternalSort) -> None:
        for rows in copies.blocks():
            rows = rows[rows[:, 0] >= self._num_protected]
            removed.add(_entries(rows, np.ones(len(rows)), _EXACT))

    def add_near(
        self, near: NearDuplicatesConfig, copies: ExternalSort | None, read_part: ReadPart, removed: ExternalSort
    ) -> None:
        workspace, memory_bytes, console = self._workspace, self._memory_bytes, self._console
        ranking = Ranking(self._parts, copies, workspace, memory_bytes=memory_bytes)
        with console.progress("Finding near duplicates", near.bands, "bands") as progress:
            pairs = similar_pairs(
                self._parts, ranking, near.threshold, workspace, memory_bytes=memory_bytes, progress=progress
            )
        with pairs:
            with console.progress("Reading candidates", self._num_documents, "documents") as progress:
                sets = read_compared(pairs, self._parts, read_part, ranking, near, workspace, progress)
            with console.progress("Comparing candidates", None, "pairs") as progress:
                found = near_copies(pairs, sets, ranking.num_ranked, near.threshold, progress)
                while batch := list(islice(found, _BATCH)):
                    ranks = np.array([pair for *pair, _ in batch], np.uint64)
                    similarities = np.array([similarity for *_, similarity in batch])
                    removed.add(_entries(ranking.ordinals[ranks], similarities, _NEAR))

    def named(self, removed: ExternalSort) -> Iterator[Removed]:
        for rows in removed.blocks():
            parts = np.searchsorted(self._starts, rows[:, : _KEPT + 1].astype(np.int64), "right") - 1
            similarities = np.ascontiguousarray(rows[:, _SIMILARITY]).view(np.float64)
            places = rows[:, : _KEPT + 1].astype(np.int64) - self._starts[parts]
            for (part, kept_part), (index, kept_index), similarity, reason in zip(
                parts.tolist(), places.tolist(), similarities.tolist(), rows[:, _REASON].tolist(), strict=True
            ):
                yield Removed(part, index, "near" if reason == _NEAR else "exact", kept_part, kept_index, similarity)


def later_copies(parts: Sequence[PartSignatures], directory: Path, *, memory_bytes: int) -> ExternalSort:
    """Every document whose text stands earlier: rows of its ordinal and that of the first with this text, ascending.

    An ordinal is the place of a document among those of all parts. Close what is returned.
    """
    copies = ExternalSort(directory / "copies", 2, memory_bytes=memory_bytes)
    with ExternalSort(directory / "ids", 3, memory_bytes=memory_bytes) as by_id:
        start = 0
        for part in parts:
            for ids in part.blocks(ID.start, ID.stop):
                ordinals = np.arange(start, start + ids.shape[1], dtype=np.uint64)
                by_id.add(np.column_stack([ids.T, ordinals]))
                start += ids.shape[1]
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


def near_copies(
    pairs: ExternalSort,
    sets: ShingleSets,
    num_ranked: int,
    threshold: float,
    progress: Progress | None = None,
) -> Iterator[tuple[int, int, float]]:
    """(rank, rank of the best document that stays and is similar enough, their similarity) of every one that goes.

    Documents are gone through from the best to the worst. One goes when it is similar enough to a document that stays;
    else it stays. So nothing goes for a chain of likenesses: whatever goes has a document left behind that it is nearly
    equal to, which joining connected components would not grant.

    `pairs` are rows of the worse and the better rank. Since they come by the worse document, what becomes of the better
    one is settled when it matters; pairs with a document that went, or of one whose fate is settled, are not compared.
    """
    gone = bytearray(num_ranked)
    for rows in pairs.blocks():
        for worse, better in rows.tolist():
            if gone[worse] or gone[better]:
                continue
            similarity = sets.similarity(worse, better)
            if similarity >= threshold:
                gone[worse] = True
                yield worse, better, similarity
        if progress:
            progress.advance(len(rows))


def _entries(rows: NDArray[np.uint64], similarities: NDArray[np.float64], reason: int) -> NDArray[np.uint64]:
    return np.column_stack([rows, similarities.view(np.uint64), np.full(len(rows), reason, np.uint64)])
