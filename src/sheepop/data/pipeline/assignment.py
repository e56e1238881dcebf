"""Where every document goes: its split, how often it occurs, and its place in the order of the corpus.

All of it follows from the ids and sizes of the documents that were kept, so it is decided in one look at the parts'
arrays, before any document is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import derive_seed
from sheepop.data.documents import StoredDocument
from sheepop.data.mixing import Mixture, copies
from sheepop.data.pipeline.parts import FinishedPart
from sheepop.data.split import Census, SplitName, Splitter

SPLITS: tuple[SplitName, ...] = ("train", "validation")
_MOST_BUCKETS = 256
_SMALLEST_BUCKET, _LARGEST_BUCKET = 2**21, 2**26
_KEY_BITS = 63


@dataclass(frozen=True)
class Placed:
    """One occurrence of a document: its bucket among all of both splits, and the key that orders it there."""

    bucket: int
    key: bytes
    document: StoredDocument


@dataclass(frozen=True)
class Assignment:
    """What decides the split, the copies and the order of documents.

    `census` knows the documents that were kept. `epochs` has one entry per mixed source. `buckets` is the number of
    files that each split is written to; `starts` has the bytes and the number of kept documents before each part.
    """

    splitter: Splitter
    census: Census
    seed: int
    shuffle: bool
    epochs: tuple[float, ...]
    buckets: tuple[int, int]
    starts: tuple[tuple[int, int], ...]

    def place(
        self, part: int, documents: Iterable[tuple[StoredDocument, int]]
    ) -> Iterator[tuple[int, SplitName, StoredDocument, list[Placed]]]:
        """The kept documents of a part, each with its mixed source, as (mixed, split, document, occurrences)."""
        passed, ordinal = self.starts[part]
        for document, mixed in documents:
            for split, piece in self.splitter.assign([document], passed):
                times = self._copies(split, mixed, document.id)
                yield mixed, split, piece, [self._placed(split, piece, n, passed, ordinal) for n in range(times)]
            passed += document.num_bytes
            ordinal += 1

    def _copies(self, split: SplitName, mixed: int, document_id: str) -> int:
        if mixed < 0 or (split == "validation" and self.epochs[mixed] > 0):
            return 1
        return copies(self.epochs[mixed], self.seed, document_id)

    def _placed(self, split: SplitName, document: StoredDocument, copy: int, passed: int, ordinal: int) -> Placed:
        count = self.buckets[SPLITS.index(split)]
        if self.shuffle:
            position = derive_seed(self.seed, "shuffle", f"{document.id} {copy}")
            bucket = position * count >> _KEY_BITS
        else:
            position = ordinal
            bucket = passed * count // max(1, self.census.num_bytes)
        first = 0 if split == "train" else self.buckets[0]
        return Placed(first + bucket, b"%016x%04x" % (position, copy), document)


def decide_assignment(
    parts: Sequence[FinishedPart],
    kept: Sequence[NDArray[np.bool_]],
    mixture: Mixture,
    *,
    mode: str,
    fraction: float,
    shuffle: bool,
    seed: int,
) -> Assignment:
    """Decides by the arrays of the parts; `kept` says for each part which of its documents are still there.

    Raises `DataError` when the mixture cannot be had.
    """
    census = Census(seed)
    starts: list[tuple[int, int]] = []
    for part, mask in zip(parts, kept, strict=True):
        starts.append((census.num_bytes, census.documents))
        for identity, size in _kept_documents(part, mask):
            census.add(identity, size)
    splitter = Splitter(mode, fraction, census)  # type: ignore[arg-type]
    epochs, train_bytes = _epochs(parts, kept, mixture, splitter)
    held_out = census.num_bytes * fraction
    buckets = (_num_buckets(train_bytes), _num_buckets(held_out) if fraction else 0)
    return Assignment(splitter, census, seed, shuffle, epochs, buckets, tuple(starts))


def _epochs(
    parts: Sequence[FinishedPart], kept: Sequence[NDArray[np.bool_]], mixture: Mixture, splitter: Splitter
) -> tuple[tuple[float, ...], float]:
    """The epochs of every mixed source, and about how many bytes of training text there will be."""
    sizes, others, passed = np.zeros(len(mixture.sources), np.int64), 0, 0
    if not mixture.sources:
        return (), float(splitter.num_bytes)
    for part, mask in zip(parts, kept, strict=True):
        mixed, num_bytes = part.mixed()[mask], part.sizes()[mask]
        is_train = np.array(splitter.trains(_kept_documents(part, mask), passed), dtype=bool)
        passed += int(num_bytes.sum())
        np.add.at(sizes, mixed[is_train & (mixed >= 0)], num_bytes[is_train & (mixed >= 0)])
        others += int(num_bytes[is_train & (mixed < 0)].sum())
    epochs = mixture.epochs(sizes.tolist(), others)
    return tuple(epochs), float(np.dot(sizes, epochs)) + others


def _kept_documents(part: FinishedPart, mask: NDArray[np.bool_]) -> Iterator[tuple[str, int]]:
    for identity, size in zip(part.ids()[mask], part.sizes()[mask].tolist(), strict=True):
        yield identity.tobytes().hex(), size


def _num_buckets(num_bytes: float) -> int:
    target = min(max(num_bytes / _MOST_BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    return max(1, round(num_bytes / target))
