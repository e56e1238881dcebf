"""Sequences of T tokens cut from a split: from documents packed end to end, or from each document alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.data.batches import IGNORED_LABEL, Batch, check_cutting, check_indices
from sheepop.data.shards import TokenSource


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
