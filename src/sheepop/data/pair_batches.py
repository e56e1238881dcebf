"""Batches of pairs: every row one source and its target, padded behind to the longest of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.data.batches import IGNORED_LABEL, Batch, check_cutting, check_indices
from sheepop.data.pairs import PairBounds
from sheepop.data.views import TokenSource

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class PairBatch(Batch):
    """Targets (B, T) as in `Batch`, and their sources (B, S) int64; `source_mask` (B, S) is False at padding."""

    source_ids: NDArray[np.int64]
    source_mask: NDArray[np.bool_]
    pad_id: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Ids, Ids]], pad_id: int) -> PairBatch:
        """One row for each (source, target), both with the tokens that begin and end them."""
        source_ids = _padded([source for source, _ in pairs], pad_id)
        input_ids = _padded([target[:-1] for _, target in pairs], pad_id)
        is_padding = _is_padding([len(target) - 1 for _, target in pairs], input_ids.shape[1])
        return cls(
            input_ids=input_ids,
            labels=_padded([target[1:] for _, target in pairs], IGNORED_LABEL),
            # As in every batch, padding is a document of its own that begins at position 0.
            positions=np.where(is_padding, np.cumsum(is_padding, axis=1) - 1, np.arange(input_ids.shape[1])),
            document_ids=is_padding.astype(np.int64),
            has_boundaries=False,
            source_ids=source_ids,
            source_mask=~_is_padding([len(source) for source, _ in pairs], source_ids.shape[1]),
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
        """The targets' and the sources' own."""
        return (*super().content(), np.array(self.source_ids.shape), self.source_ids, self.source_mask)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> PairBatch:
        """One batch of the rows of several, padded to the longest of them all."""
        pairs = [batch for batch in batches if isinstance(batch, PairBatch)]
        return cls.of([batch.pair(row) for batch in pairs for row in range(len(batch.input_ids))], pairs[0].pad_id)

    def rows(self, chosen: NDArray[np.int64] | slice) -> PairBatch:
        """The chosen rows, in the order given, padded to the longest of them."""
        numbers = np.arange(len(self.input_ids))[chosen]
        return PairBatch.of([self.pair(row) for row in numbers.tolist()], self.pad_id)

    def cut(self, length: int) -> PairBatch:
        """The batch as it is; raises ValueError when `length` is less than that of a target, which stays whole."""
        if length < self.input_ids.shape[1]:
            raise ValueError(f"targets of {self.input_ids.shape[1]} tokens cannot be cut into rows of {length}")
        return self


class PairBatches:
    """Sample i is the i-th pair of the split that fits: neither side is longer than `max_length` tokens.

    With `leave_out_long` the others are left out and counted in `num_left_out`; without it they raise `DataError`,
    as a split does of which nothing is left.
    """

    def __init__(
        self, split: TokenSource, *, max_length: int, pad_id: int, eos_id: int, leave_out_long: bool = False
    ) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._pad_id = split, pad_id
        self._bounds = bounds = PairBounds.of(split, eos_id)
        longest = np.maximum(bounds.source_lengths, bounds.target_lengths)
        (self._samples,) = np.nonzero(longest <= max_length)
        self.num_left_out = len(longest) - len(self._samples)
        if self.num_left_out and not (leave_out_long and self._samples.size):
            raise DataError(_too_long(bounds, max_length, self.num_left_out))
        self._lengths = longest[self._samples]

    @property
    def num_samples(self) -> int:
        """How many pairs there are that fit."""
        return len(self._samples)

    @property
    def max_length(self) -> int:
        """The most tokens of a source or of a target."""
        return int(self._lengths.max(initial=1))

    @property
    def tokens_per_sample(self) -> float:
        """The mean number of tokens that are predicted for a source, ``<eos>`` included."""
        return float(self._bounds.target_lengths[self._samples].mean()) if self.num_samples else 1.0

    def batch(self, sample_indices: NDArray[np.int64]) -> PairBatch:
        """The pairs in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        return PairBatch.of([self._pair(number) for number in self._samples[indices].tolist()], self._pad_id)

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens ``start:stop`` of the split that a pair consists of."""
        check_indices(np.array([sample]), self.num_samples)
        number = self._samples[sample]
        return int(self._bounds.begins[number]), int(self._bounds.ends[number])

    def _pair(self, number: int) -> tuple[Ids, Ids]:
        begin, target, end = (int(x[number]) for x in (self._bounds.begins, self._bounds.targets, self._bounds.ends))
        tokens = self._split.tokens(begin, end)
        return tokens[: target - begin], tokens[target - begin :]


def _padded(rows: Sequence[Ids], padding: int) -> NDArray[np.int64]:
    """The rows below each other, each filled up behind."""
    filled = np.full((len(rows), max(map(len, rows), default=0)), padding, dtype=np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled


def _is_padding(lengths: Sequence[int], width: int) -> NDArray[np.bool_]:
    return np.arange(width) >= np.array(lengths, dtype=np.int64)[:, None]


def _too_long(bounds: PairBounds, max_length: int, count: int) -> str:
    source, target = int(bounds.source_lengths.max()), int(bounds.target_lengths.max())
    return (
        f"{count:,} of {len(bounds.begins):,} pairs are longer than the {max_length} tokens that a source or a "
        f"target may have: the longest source has {source}, the longest target {target}, including the token that "
        f"begins or ends it. Raise model.max_seq_len (and data.max_length, where it is set) to {max(source, target)}"
        + (", or leave them out with data.long_pairs=leave_out." if count < len(bounds.begins) else ".")
    )
