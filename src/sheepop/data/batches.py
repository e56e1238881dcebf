"""A batch of token sequences, and what every way of cutting them from a corpus offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences for one step; all arrays are (B, T) int64.

    ``labels[b, t]`` is the token after ``input_ids[b, t]`` in the same document, or -100 where there is none or
    it does not count. `positions` count from 0 at the beginning of the row and of every document. `document_ids`
    number the documents of each row 0, 1, 2, ...; the padding at the end of a row has a number of its own.
    `has_boundaries` tells whether a document begins inside a row; when it is false, plain causal attention with
    positions 0 .. T - 1 is exact, because padding comes last and has no labels.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    has_boundaries: bool

    @property
    def num_labels(self) -> int:
        """How many positions count for the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))


class Batches(Protocol):
    """A corpus split cut into `num_samples` sequences of `max_length` tokens, each made on demand."""

    @property
    def num_samples(self) -> int:
        """How many sequences one pass over the split has."""

    @property
    def max_length(self) -> int:
        """T, the number of tokens in a row."""

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The batch whose row b is the sample ``sample_indices[b]``."""

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens ``start:stop`` of the split that are the inputs of a sample."""


def check_cutting(max_length: int, pad_id: int) -> None:
    """Raises ValueError unless sequences have at least one token and padding is a token id."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if pad_id < 0:
        raise ValueError(f"pad_id must be a token id, got {pad_id}")


def check_indices(sample_indices: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """The indices as a 1-d int64 array; raises IndexError when one is not a sample."""
    indices = np.asarray(sample_indices, dtype=np.int64)
    if indices.ndim != 1:
        raise ValueError(f"sample indices have one dimension, got shape {indices.shape}")
    if indices.size and (indices.min() < 0 or indices.max() >= num_samples):
        raise IndexError(f"sample indices {indices.min()} to {indices.max()}, but there are {num_samples} samples")
    return indices
