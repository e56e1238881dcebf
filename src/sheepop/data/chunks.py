"""Padded sequences: every document alone, cut into chunks of T tokens that begin `stride` tokens apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.data.batches import IGNORED_LABEL, Batch, check_cutting, check_indices
from sheepop.data.views import TokenSource


class PaddedBatches:
    """Chunk k of a document covers its tokens ``k*stride .. k*stride + T - 1``; the last one is padded.

    There are as many chunks as it takes to reach the end of the document, so every token is in a chunk, and in
    exactly one when the stride is T (the default). The label of a chunk's last token is the next token of the
    document. With `count_once` the labels that an overlapping earlier chunk has already are -100, so that an
    evaluation counts every token once, with at least ``T - stride`` tokens of context where there are any.
    """

    def __init__(
        self,
        split: TokenSource,
        *,
        max_length: int,
        pad_id: int,
        stride: int | None = None,
        count_once: bool = False,
    ) -> None:
        check_cutting(max_length, pad_id)
        stride = max_length if stride is None else stride
        if not 1 <= stride <= max_length:
            raise ValueError(f"stride must be from 1 to max_length = {max_length}, got {stride}")
        self._split, self._max_length, self._pad_id = split, max_length, pad_id
        self._stride, self._count_once = stride, count_once
        lengths = np.diff(split.offsets)
        chunks = np.maximum(-(-(lengths - max_length) // stride), 0) + 1
        # Where the chunks of each document begin among all samples, (num_documents + 1,).
        self._first_sample = np.concatenate([[0], np.cumsum(chunks, dtype=np.int64)])

    @property
    def num_samples(self) -> int:
        """The number of chunks of all documents."""
        return int(self._first_sample[-1])

    @property
    def max_length(self) -> int:
        """T, the number of tokens in a row."""
        return self._max_length

    @property
    def tokens_per_sample(self) -> float:
        """Those of a row."""
        return self._max_length

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The chunks in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        documents = np.searchsorted(self._first_sample, indices, side="right") - 1
        chunks = indices - self._first_sample[documents]
        starts = self._split.offsets[documents] + chunks * self._stride
        ends = self._split.offsets[documents + 1]
        lengths = np.minimum(self._max_length, ends - starts)

        shape = (len(indices), self._max_length)
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, (start, end, length) in enumerate(zip(starts.tolist(), ends.tolist(), lengths.tolist(), strict=True)):
            tokens = self._split.tokens(start, min(start + length + 1, end))
            input_ids[row, :length] = tokens[:length]
            labels[row, : len(tokens) - 1] = tokens[1:]
        columns = np.arange(self._max_length, dtype=np.int64)
        if self._count_once:
            labels[(chunks[:, None] > 0) & (columns < self._max_length - self._stride)] = IGNORED_LABEL
        is_padding = columns >= lengths[:, None]
        positions = columns - np.where(is_padding, lengths[:, None], 0)
        return Batch(input_ids, labels, positions, is_padding.astype(np.int64), has_boundaries=False)

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens ``start:stop`` of the split that are the inputs of a sample."""
        check_indices(np.array([sample]), self.num_samples)
        document = int(np.searchsorted(self._first_sample, sample, side="right")) - 1
        start = int(self._split.offsets[document]) + (sample - int(self._first_sample[document])) * self._stride
        return start, min(start + self._max_length, int(self._split.offsets[document + 1]))
