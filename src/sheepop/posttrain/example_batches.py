"""Rows of whole examples: several to a row with their borders kept, or one to a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sheepop.data import Batch, Batches
from sheepop.data.batches import IGNORED_LABEL, check_cutting, check_indices
from sheepop.posttrain.example_store import ExampleSplit, Learnt


class ExampleRows(Batches, Protocol):
    """Rows made of whole examples of a split."""

    def examples(self, sample: int) -> list[int]:
        """The numbers of the examples in a sample."""


class PackedExamples:
    """Sample i holds the examples ``rows[i]``, one after the other, and padding up to T tokens.

    Examples are placed longest first, each into the fullest row that has room for it (best-fit decreasing, Johnson
    1974), so that no example is cut and few tokens are padding. Nothing is seen or learnt across the border of two.
    """

    def __init__(self, split: ExampleSplit, *, max_length: int, pad_id: int) -> None:
        check_cutting(max_length, pad_id)
        if split.num_examples and int(split.lengths.max()) > max_length:
            raise ValueError(f"an example of {int(split.lengths.max())} tokens does not fit rows of {max_length}")
        self._split, self._max_length, self._pad_id = split, max_length, pad_id
        self.rows = best_fit(split.lengths.tolist(), max_length)

    @property
    def num_samples(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def max_length(self) -> int:
        """T, the number of tokens in a row."""
        return self._max_length

    @property
    def tokens_per_sample(self) -> float:
        """Those of a row, padding too."""
        return self._max_length

    def examples(self, sample: int) -> list[int]:
        """The numbers of the examples in a sample."""
        return self.rows[sample]

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        return _batch(self._split, [self.rows[index] for index in indices.tolist()], self._max_length, self._pad_id)


class _WholeRows(Batch):
    """Rows as long as the longest of them, which are never cut."""

    def cut(self, length: int) -> Batch:
        """The batch as it is; raises ValueError for rows that are longer."""
        if self.input_ids.shape[1] > length:
            raise ValueError(f"rows of {self.input_ids.shape[1]} tokens cannot be cut into rows of {length}")
        return self


class PaddedExamples:
    """Sample i is example i, padded to the longest of its batch."""

    def __init__(self, split: ExampleSplit, *, max_length: int, pad_id: int) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._pad_id = split, pad_id

    @property
    def num_samples(self) -> int:
        """The number of examples."""
        return self._split.num_examples

    @property
    def max_length(self) -> int:
        """The tokens of the longest example."""
        return int(self._split.lengths.max(initial=1))

    @property
    def tokens_per_sample(self) -> float:
        """The mean of the examples."""
        return float(self._split.lengths.mean()) if self.num_samples else 1.0

    def examples(self, sample: int) -> list[int]:
        """The number of the example that is a sample."""
        return [sample]

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples).tolist()
        length = int(self._split.lengths[indices].max(initial=1))
        made = _batch(self._split, [[index] for index in indices], length, self._pad_id)
        return _WholeRows(made.input_ids, made.labels, made.positions, made.document_ids, made.has_boundaries)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Which examples share a row: numbers of `lengths`, of which each row's sum is at most `room`.

    Longest first, equal ones in their order; each goes where the least room is left that is enough.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # the room of every row that another may fit, with its number, in order
    shortest = min(lengths, default=0)
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(left, (lengths[number], 0))
        if place == len(left):
            rows.append([number])
            free, row = room, len(rows) - 1
        else:
            free, row = left.pop(place)
            rows[row].append(number)
        if free - lengths[number] >= shortest:
            insort(left, (free - lengths[number], row))
    return rows


def _batch(split: ExampleSplit, rows: list[list[int]], length: int, pad_id: int) -> Batch:
    return batch_of([[split.example(number) for number in numbers] for numbers in rows], length, pad_id)


def batch_of(rows: Sequence[Sequence[Learnt]], length: int, pad_id: int) -> Batch:
    """Rows of `length` tokens, each with its examples one after the other and padding behind them."""
    shape = (len(rows), length)
    input_ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
    begins = np.zeros(shape, dtype=bool)
    has_boundaries = False
    for row, examples in enumerate(rows):
        place = 0
        for ids, supervised in examples:
            end = place + len(ids)
            begins[row, place] = True
            input_ids[row, place:end] = ids
            labels[row, place : end - 1] = np.where(supervised[1:], ids[1:], IGNORED_LABEL)
            place = end
        if place < length:
            begins[row, place] = True
        has_boundaries |= len(examples) > 1
    columns = np.arange(length, dtype=np.int64)
    starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return Batch(input_ids, labels, columns - starts, np.cumsum(begins, axis=1, dtype=np.int64) - 1, has_boundaries)
