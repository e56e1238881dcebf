"""Batches of token sequences, cut from a split: from packed documents, from each document alone, or from pairs.

A split stores a pair as ``source <eos> <bos> target <eos>``: the encoder reads up to the first ``<eos>``, the decoder
from ``<bos>`` on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.data.shards import TokenSource

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences for one step; all arrays are (B, T) int64.

    ``labels[b, t]`` is the token after ``input_ids[b, t]`` in the same document, or -100 if there is none or it does
    not count. `positions` restart from 0 at the start of the row and of every document. `document_ids` number the
    documents of each row 0, 1, 2, ...; the padding at the end of a row has its own number. If `has_boundaries` is
    false, no document begins inside a row, and plain causal attention with positions 0 .. T - 1 is exact, because
    padding comes last and has no labels.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    has_boundaries: bool

    @property
    def num_labels(self) -> int:
        """The number of positions that count for the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    def inputs(self) -> dict[str, NDArray[Any]]:
        """The arguments of the model's `hidden_states`, without positions and documents if plain attention is exact."""
        if not self.has_boundaries:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "positions": self.positions, "document_ids": self.document_ids}

    def given(self) -> dict[str, NDArray[Any]]:
        """Further arrays for the objective by name, each with one entry per row; none by default."""
        return {}

    def content(self) -> tuple[NDArray[Any], ...]:
        """The arrays that `batch_hash` covers."""
        return np.array(self.input_ids.shape), self.input_ids, self.labels, self.document_ids

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Joins the rows of several batches, all of one length."""
        parts = zip(*(batch._arrays() for batch in batches), strict=True)
        input_ids, labels, positions, document_ids = map(np.concatenate, parts)
        return cls(input_ids, labels, positions, document_ids, any(batch.has_boundaries for batch in batches))

    def rows(self, chosen: NDArray[np.int64] | slice) -> Batch:
        """The chosen rows, in the given order."""
        return self._part(*(array[chosen] for array in self._arrays()))

    def cut(self, length: int) -> Batch:
        """Cuts every row of T tokens into T / length rows (B T / length, length); keeps all tokens and labels.

        Positions and document ids restart in every row, so a token has less context. Raises ValueError if `length`
        does not divide T.
        """
        row_length = self.input_ids.shape[1]
        if row_length % length:
            raise ValueError(f"rows of {row_length} tokens cannot be cut into rows of {length}")
        if length == row_length:
            return self
        input_ids, labels, positions, document_ids = (array.reshape(-1, length) for array in self._arrays())
        document_ids = document_ids - document_ids[:, :1]
        positions = positions - np.where(document_ids == 0, positions[:, :1], 0)
        return self._part(input_ids, labels, positions, document_ids)

    def _arrays(self) -> tuple[NDArray[np.int64], ...]:
        return self.input_ids, self.labels, self.positions, self.document_ids

    def _part(self, *arrays: NDArray[np.int64]) -> Batch:
        """A batch of some rows of this one; it checks whether a boundary is still inside a row."""
        input_ids, labels, positions, document_ids = arrays
        has_boundaries = self.has_boundaries and bool((document_ids[:, -1] > 0).any())
        return Batch(input_ids, labels, positions, document_ids, has_boundaries)


def batch_hash(batch: Batch) -> str:
    """SHA-256 of a global batch: the arrays of its `content` as 64-bit numbers, whatever the micro-batch size."""
    digest = hashlib.sha256()
    for array in batch.content():
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


class Batches(Protocol):
    """Training data cut into `num_samples` sequences of `max_length` tokens, each made on demand."""

    @property
    def num_samples(self) -> int:
        """The number of sequences in one pass over the split."""

    @property
    def max_length(self) -> int:
        """T, the most tokens in a row."""

    @property
    def tokens_per_sample(self) -> float:
        """How much a sample counts in a budget of tokens."""

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The batch whose row b is the sample ``sample_indices[b]``."""


@runtime_checkable
class TextBatches(Batches, Protocol):
    """Sequences that are consecutive tokens of a split."""

    def token_range(self, sample: int) -> tuple[int, int]:
        """The range ``start:stop`` of a sample's input tokens in the split."""


def check_cutting(max_length: int, pad_id: int) -> None:
    """Raises ValueError unless `max_length` is at least 1 and `pad_id` at least 0."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if pad_id < 0:
        raise ValueError(f"pad_id must be a token id, got {pad_id}")


def check_indices(sample_indices: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """The indices as a 1-d int64 array; raises IndexError if one is out of range."""
    indices = np.asarray(sample_indices, dtype=np.int64)
    if indices.ndim != 1:
        raise ValueError(f"sample indices have one dimension, got shape {indices.shape}")
    if indices.size and (indices.min() < 0 or indices.max() >= num_samples):
        raise IndexError(f"sample indices {indices.min()} to {indices.max()}, but there are {num_samples} samples")
    return indices


class _Rows:
    """Cuts stretches of tokens into rows: row k has the tokens ``k*stride .. k*stride + T - 1``; the last is padded.

    A stretch lies between two consecutive `bounds` in the split and has as many rows as it takes to reach its end.
    """

    def __init__(
        self, split: TokenSource, bounds: NDArray[np.int64], *, max_length: int, pad_id: int, stride: int
    ) -> None:
        check_cutting(max_length, pad_id)
        if not 1 <= stride <= max_length:
            raise ValueError(f"stride must be from 1 to max_length = {max_length}, got {stride}")
        self._split, self._bounds, self._pad_id, self._stride = split, bounds, pad_id, stride
        rows = np.maximum(-(-(np.diff(bounds) - max_length) // stride), 0) + 1
        # The index of the first row of each stretch, (stretches + 1,).
        self._first_sample = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.num_samples = int(self._first_sample[-1])
        self.max_length = self.tokens_per_sample = max_length

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the given order; raises IndexError for one that does not exist."""
        starts, ends = self._places(check_indices(sample_indices, self.num_samples))
        shape = (len(starts), self.max_length)
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            tokens = self._split.tokens(start, min(start + self.max_length + 1, end))
            input_ids[row, : len(tokens)] = tokens[: self.max_length]
            labels[row, : len(tokens) - 1] = tokens[1:]
        # The columns at which documents end, where another document or the padding begins.
        lengths = np.minimum(self.max_length, ends - starts)
        offsets = self._split.offsets
        first, last = np.searchsorted(offsets, [starts, starts + lengths], side="right")
        rows = np.repeat(np.arange(len(starts)), last - first)
        found = [offsets[low:high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]
        columns = np.concatenate([offsets[:0], *found]) - starts[rows]
        labels[rows, columns - 1] = IGNORED_LABEL
        has_boundaries = bool((columns < lengths[rows]).any())
        begins = np.zeros((len(starts), self.max_length + 1), dtype=bool)
        begins[rows, columns] = True
        document_ids = np.cumsum(begins[:, :-1], axis=1, dtype=np.int64)
        places = np.arange(self.max_length, dtype=np.int64)
        positions = places - np.maximum.accumulate(np.where(begins[:, :-1], places, 0), axis=1)
        return Batch(input_ids, labels, positions, document_ids, has_boundaries)

    def token_range(self, sample: int) -> tuple[int, int]:
        """The range ``start:stop`` of a sample's input tokens in the split."""
        (start,), (end,) = self._places(check_indices(np.array([sample]), self.num_samples))
        return int(start), int(min(start + self.max_length, end))

    def _places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The start of each sample in the split, and the end of its stretch."""
        numbers = np.searchsorted(self._first_sample, samples, side="right") - 1
        starts = self._bounds[numbers] + (samples - self._first_sample[numbers]) * self._stride
        return starts, self._bounds[numbers + 1]


class PackedBatches(_Rows):
    """Documents packed end to end: sample i has the tokens ``i*T .. (i+1)*T - 1``; the last one is padded.

    Every token is an input exactly once. Labels do not cross documents, so the last token of a document (its
    ``<eos>``) has no label.
    """

    def __init__(self, split: TokenSource, *, max_length: int, pad_id: int) -> None:
        whole = np.array([0, split.num_tokens] if split.num_tokens else [0], dtype=np.int64)
        super().__init__(split, whole, max_length=max_length, pad_id=pad_id, stride=max_length)


class PaddedBatches(_Rows):
    """Chunks of each document alone: chunk k has its tokens ``k*stride .. k*stride + T - 1``; the last is padded.

    The chunks of a document reach its end, so every token is in a chunk, and in exactly one if the stride is T (the
    default). The label of a chunk's last token is the next token of the document. With `count_once`, labels that an
    earlier overlapping chunk has are -100, so that an evaluation counts every token once, with at least
    ``T - stride`` tokens of context if there are that many.
    """

    def __init__(
        self, split: TokenSource, *, max_length: int, pad_id: int, stride: int | None = None, count_once: bool = False
    ) -> None:
        stride = max_length if stride is None else stride
        super().__init__(split, split.offsets, max_length=max_length, pad_id=pad_id, stride=stride)
        self._count_once = count_once

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The chunks in the given order; raises IndexError for one that does not exist."""
        batch = super().batch(sample_indices)
        if self._count_once:
            is_later = ~np.isin(sample_indices, self._first_sample)
            batch.labels[is_later, : self.max_length - self._stride] = IGNORED_LABEL
        return batch


Ids = NDArray[np.integer[Any]]
_BLOCK_TOKENS = 2**20


class WholeRows(Batch):
    """Rows with texts that are never cut."""

    def cut(self, length: int) -> Self:
        """Returns the batch itself; raises ValueError if its rows are longer than `length`."""
        if self.input_ids.shape[-1] > length:
            raise ValueError(f"rows of {self.input_ids.shape[-1]} tokens cannot be cut into rows of {length}")
        return self


@dataclass(frozen=True, eq=False)
class PaddedRows(WholeRows):
    """One text a row; `lengths` (B,) counts its tokens without the padding at the end."""

    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Batch, lengths: NDArray[np.int64]) -> PaddedRows:
        """The rows of `batch`."""
        input_ids, labels, positions, document_ids = batch._arrays()
        return cls(input_ids, labels, positions, document_ids, batch.has_boundaries, lengths)

    def rows(self, chosen: NDArray[np.int64] | slice) -> PaddedRows:
        """The chosen rows, in the given order, without the padding that all of them share."""
        lengths = self.lengths[chosen]
        cut = (array[chosen][:, : int(lengths.max(initial=1))] for array in self._arrays())
        input_ids, labels, positions, document_ids = cut
        return PaddedRows(input_ids, labels, positions, document_ids, self.has_boundaries, lengths)


@dataclass(frozen=True, eq=False)
class PairBatch(WholeRows):
    """Targets (B, T) as in `Batch`, and their sources (B, S) int64; `source_mask` (B, S) is False at padding."""

    source_ids: NDArray[np.int64]
    source_mask: NDArray[np.bool_]
    pad_id: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Ids, Ids]], pad_id: int) -> PairBatch:
        """One row for each (source, target); both include their ``<bos>`` and ``<eos>``."""
        source_ids, source_mask = _padded([source for source, _ in pairs], pad_id)
        labels, _ = _padded([target[1:] for _, target in pairs], IGNORED_LABEL)
        input_ids, is_target = _padded([target[:-1] for _, target in pairs], pad_id)
        # As in every batch, padding is a document of its own, whose positions start at 0.
        positions = np.where(is_target, np.arange(input_ids.shape[1]), np.cumsum(~is_target, axis=1) - 1)
        document_ids = (~is_target).astype(np.int64)
        return cls(input_ids, labels, positions, document_ids, False, source_ids, source_mask, pad_id)

    def pair(self, row: int) -> tuple[Ids, Ids]:
        """The (source, target) of a row, without padding."""
        length = int(np.count_nonzero(self.document_ids[row] == 0))
        target = np.append(self.input_ids[row, :length], self.labels[row, length - 1])
        return self.source_ids[row, self.source_mask[row]], target

    def inputs(self) -> dict[str, NDArray[Any]]:
        """The target ids for the decoder, and the source for the encoder."""
        return {"input_ids": self.input_ids, "source_ids": self.source_ids, "source_mask": self.source_mask}

    def content(self) -> tuple[NDArray[Any], ...]:
        """The arrays to hash, with the sources."""
        return (*super().content(), np.array(self.source_ids.shape), self.source_ids, self.source_mask)

    @classmethod
    def joined(cls, batches: Sequence[Any]) -> PairBatch:
        """Joins the rows of several batches of pairs, padded to the longest of all."""
        return cls.of([batch.pair(row) for batch in batches for row in range(len(batch.labels))], batches[0].pad_id)

    def rows(self, chosen: NDArray[np.int64] | slice) -> PairBatch:
        """The chosen rows, in the given order, padded to the longest of them."""
        return PairBatch.of([self.pair(row) for row in np.arange(len(self.labels))[chosen].tolist()], self.pad_id)


class PairBatches:
    """Batches of the pairs of a split that fit: neither side is longer than `max_length` tokens.

    With `leave_out_long`, longer pairs are left out and counted in `num_left_out`; without it, or if no pair fits,
    they raise `DataError`. The length of a source includes its ``<eos>``; the length of a target includes either
    ``<bos>`` (as input) or ``<eos>`` (as labels), and `tokens_per_sample` is its mean.
    """

    def __init__(
        self, split: TokenSource, *, max_length: int, pad_id: int, eos_id: int, leave_out_long: bool = False
    ) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._pad_id = split, pad_id
        begins, targets, ends = bounds = _bounds(split, eos_id)
        sources_and_targets = np.stack([targets - begins, ends - targets - 1])
        longest = sources_and_targets.max(axis=0)
        fits = longest <= max_length
        self.num_left_out = len(fits) - int(np.count_nonzero(fits))
        if self.num_left_out and not (leave_out_long and fits.any()):
            source, target = sources_and_targets.max(axis=1).tolist()
            raise DataError(
                f"{self.num_left_out:,} of {len(fits):,} pairs are longer than the {max_length} tokens that a source "
                f"or a target may have: the longest source has {source}, the longest target {target}, including the "
                "token that begins or ends it. Raise model.max_seq_len (and data.max_length, where it is set) to "
                f"{max(source, target)}"
                + (", or leave them out with data.long_pairs=leave_out." if fits.any() else ".")
            )
        self._bounds = bounds[:, fits]
        self.num_samples = self._bounds.shape[1]
        self.max_length = int(longest[fits].max(initial=1))
        self.tokens_per_sample = float(sources_and_targets[1, fits].mean()) if self.num_samples else 1.0

    def batch(self, sample_indices: NDArray[np.int64]) -> PairBatch:
        """The pairs in the given order; raises IndexError for one that does not exist."""
        pairs = []
        for begin, target, end in self._bounds[:, check_indices(sample_indices, self.num_samples)].T.tolist():
            tokens = self._split.tokens(begin, end)
            pairs.append((tokens[: target - begin], tokens[target - begin :]))
        return PairBatch.of(pairs, self._pad_id)

    def token_range(self, sample: int) -> tuple[int, int]:
        """The range ``start:stop`` of a pair's tokens in the split."""
        check_indices(np.array([sample]), self.num_samples)
        begin, _, end = self._bounds[:, sample].tolist()
        return begin, end


def _bounds(split: TokenSource, eos_id: int) -> NDArray[np.int64]:
    """The offsets of each pair's source, target and end, ``(3, N)``; raises `DataError` if a document is no pair."""
    begins, ends = split.offsets[:-1], split.offsets[1:]
    targets = np.zeros(len(begins), dtype=np.int64)
    for start in range(0, split.num_tokens, _BLOCK_TOKENS):
        block = split.tokens(start, min(start + _BLOCK_TOKENS, split.num_tokens))
        places = start + np.flatnonzero(block == eos_id)
        documents = np.searchsorted(split.offsets, places, side="right") - 1
        is_new = targets[documents] == 0
        found, first = np.unique(documents[is_new], return_index=True)
        targets[found] = places[is_new][first] + 1
    # After the source there are at least <bos> and <eos>.
    (broken,) = np.nonzero((targets == 0) | (ends - targets < 2))
    if broken.size:
        raise DataError(f"Document {broken[0]} of the corpus is not a pair of source and target. Build it again.")
    return np.stack([begins, targets, ends])


def _padded(rows: Sequence[Ids], padding: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Stacks rows, padded on the right, and returns a mask that is False at padding."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    is_given = np.arange(lengths.max(initial=0)) < lengths[:, None]
    filled = np.full(is_given.shape, padding, dtype=np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled, is_given
