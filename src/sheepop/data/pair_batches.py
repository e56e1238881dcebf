"""Batches of pairs: each row is one source and its target, padded on the right to the longest of the batch.

A split stores a pair as ``source <eos> <bos> target <eos>``: the encoder reads up to the first ``<eos>``, the decoder
from ``<bos>`` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.data.batches import IGNORED_LABEL, Batch, check_cutting, check_indices
from sheepop.data.shards import TokenSource

Ids = NDArray[np.integer[Any]]
_BLOCK_TOKENS = 2**20


@dataclass(frozen=True, eq=False)
class PairBatch(Batch):
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
        return cls(
            input_ids=input_ids,
            labels=labels,
            # As in every batch, padding is a document of its own, whose positions start at 0.
            positions=np.where(is_target, np.arange(input_ids.shape[1]), np.cumsum(~is_target, axis=1) - 1),
            document_ids=(~is_target).astype(np.int64),
            has_boundaries=False,
            source_ids=source_ids,
            source_mask=source_mask,
            pad_id=pad_id,
        )

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

    def cut(self, length: int) -> PairBatch:
        """Returns the batch itself, as targets are never cut; raises ValueError if they are longer than `length`."""
        if length < self.input_ids.shape[1]:
            raise ValueError(f"targets of {self.input_ids.shape[1]} tokens cannot be cut into rows of {length}")
        return self


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
    """The offsets of each pair's source, target and end, ``(3, N)``.

    Reads the whole split, one block at a time; raises `DataError` for a document that is not a pair.
    """
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
