"""Packed sequences: the documents of a split end to end, cut every T tokens, with the boundaries kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.data.batches import IGNORED_LABEL, Batch, check_cutting, check_indices
from sheepop.data.views import TokenSource


class PackedBatches:
    """Sample i covers the tokens ``i*T .. (i+1)*T - 1`` of the split; the last one is padded.

    Every token is an input exactly once. A token is predicted from the one before it in the same document, so the
    last token of a document (its ``<eos>``) has no label to predict after it.
    """

    def __init__(self, split: TokenSource, *, max_length: int, pad_id: int) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._max_length, self._pad_id = split, max_length, pad_id

    @property
    def num_samples(self) -> int:
        """The number of tokens over T, rounded up."""
        return -(-self._split.num_tokens // self._max_length)

    @property
    def max_length(self) -> int:
        """T, the number of tokens in a row."""
        return self._max_length

    @property
    def tokens_per_sample(self) -> float:
        """Those of a row."""
        return self._max_length

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        shape = (len(indices), self._max_length)
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        begins = np.zeros(shape, dtype=bool)
        has_boundaries = False
        for row, index in enumerate(indices.tolist()):
            has_boundaries |= self._fill(index, input_ids[row], labels[row], begins[row])
        begins[:, 0] = True
        columns = np.arange(self._max_length, dtype=np.int64)
        starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        document_ids = np.cumsum(begins, axis=1, dtype=np.int64) - 1
        return Batch(input_ids, labels, columns - starts, document_ids, has_boundaries)

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens ``start:stop`` of the split that are the inputs of a sample."""
        check_indices(np.array([sample]), self.num_samples)
        start = sample * self._max_length
        return start, min(start + self._max_length, self._split.num_tokens)

    def _fill(
        self, index: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64], begins: NDArray[np.bool_]
    ) -> bool:
        """Writes one row and marks the columns where a document or the padding begins."""
        start = index * self._max_length
        stop = min(start + self._max_length, self._split.num_tokens)
        length = stop - start
        tokens = self._split.tokens(start, min(stop + 1, self._split.num_tokens))
        input_ids[:length] = tokens[:length]
        labels[: len(tokens) - 1] = tokens[1:]
        # The places after `start` and up to `stop` where a document begins; the end of the split counts as one.
        offsets = self._split.offsets
        first, last = np.searchsorted(offsets, [start, stop], side="right")
        boundaries = offsets[first:last] - start
        labels[boundaries - 1] = IGNORED_LABEL
        inside = boundaries[boundaries < self._max_length]
        begins[inside] = True
        return bool((inside < length).any())
