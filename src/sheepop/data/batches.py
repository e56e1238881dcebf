"""A batch of token sequences, and what every way of cutting them from a corpus offers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences for one step; all arrays are (B, T) int64.

    ``labels[b, t]`` is the token after ``input_ids[b, t]`` in the same document, or -100 where there is none or
    it does not count. `positions` count from 0 at the beginning of the row and of every document. `document_ids`
    number the documents of each row 0, 1, 2, ...; the padding at the end of a row has a number of its own.
    When `has_boundaries` is false no document begins inside a row, and plain causal attention with positions
    0 .. T - 1 is exact, because padding comes last and has no labels.
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

    def inputs(self) -> dict[str, NDArray[Any]]:
        """What the network reads, by the names that its `hidden_states` has for it.

        Positions and documents are left out where plain causal attention is exact.
        """
        if not self.has_boundaries:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "positions": self.positions, "document_ids": self.document_ids}

    def given(self) -> dict[str, NDArray[Any]]:
        """What an objective reads beside inputs and labels, by name, one entry of each array for a row."""
        return {}

    def content(self) -> tuple[NDArray[Any], ...]:
        """What `batch_hash` is taken of."""
        return np.array(self.input_ids.shape), self.input_ids, self.labels, self.document_ids

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """One batch of the rows of several, all of one length."""
        parts = zip(*(batch._arrays() for batch in batches), strict=True)
        input_ids, labels, positions, document_ids = map(np.concatenate, parts)
        return cls(input_ids, labels, positions, document_ids, any(batch.has_boundaries for batch in batches))

    def rows(self, chosen: NDArray[np.int64] | slice) -> Batch:
        """The chosen rows, in the order given."""
        return self._part(*(array[chosen] for array in self._arrays()))

    def cut(self, length: int) -> Batch:
        """Every row of T tokens as T / length rows (B T / length, length); no token and no label is lost.

        Positions and document ids begin anew with every row, so a token sees less of what came before it. Raises
        ValueError when `length` does not divide T.
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
        """A batch of rows of this one, which need not have the boundary that it has."""
        input_ids, labels, positions, document_ids = arrays
        has_boundaries = self.has_boundaries and bool((document_ids[:, -1] > 0).any())
        return Batch(input_ids, labels, positions, document_ids, has_boundaries)


def batch_hash(batch: Batch) -> str:
    """SHA-256 of a global batch: its shape, token ids, labels and document ids, row by row, as 64-bit numbers.

    A batch that holds more adds it. It is that of the whole batch, however a step is cut into micro-batches.
    """
    digest = hashlib.sha256()
    for array in batch.content():
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


class Batches(Protocol):
    """What steps learn from, cut into `num_samples` sequences of `max_length` tokens, each made on demand."""

    @property
    def num_samples(self) -> int:
        """How many sequences one pass over the split has."""

    @property
    def max_length(self) -> int:
        """T, the most tokens in a row."""

    @property
    def tokens_per_sample(self) -> float:
        """What a sample counts for in a budget of tokens."""

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The batch whose row b is the sample ``sample_indices[b]``."""


@runtime_checkable
class TextBatches(Batches, Protocol):
    """Sequences that are consecutive tokens of a split."""

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
