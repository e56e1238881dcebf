"""A batch of token sequences, and the protocols of classes that cut batches from a corpus."""

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
    """SHA-256 of a global batch: its shape, token ids, labels and document ids, row by row, as 64-bit numbers.

    Subclasses add their own arrays. The hash covers the whole batch, whatever the micro-batch size.
    """
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
