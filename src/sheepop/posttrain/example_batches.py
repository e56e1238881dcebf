"""Batches of whole examples: packed into rows, padded one to a row, or in groups that are compared."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sheepop.data import Batch, Batches
from sheepop.data.batches import IGNORED_LABEL, PaddedRows, WholeRows, check_cutting, check_indices
from sheepop.posttrain.example_store import ExampleSplit, Learnt


class ExampleRows(Batches, Protocol):
    """Rows made of whole examples of a split."""

    def examples(self, sample: int) -> list[int]:
        """The numbers of the examples in a sample."""


class PackedExamples:
    """Sample i is the examples ``rows[i]`` one after the other, padded to T tokens.

    Examples are placed longest first, each into the fullest row that has room for it (best-fit decreasing, Johnson
    1974), so that no example is cut and few tokens are padding. Neither attention nor labels cross from one example to
    the next. With `parts`, the numbers of some examples each, those of different parts are in different rows.
    """

    def __init__(
        self, split: ExampleSplit, *, max_length: int, pad_id: int, parts: Sequence[NDArray[np.int64]] = ()
    ) -> None:
        check_cutting(max_length, pad_id)
        if split.num_examples and int(split.lengths.max()) > max_length:
            raise ValueError(f"an example of {int(split.lengths.max())} tokens does not fit rows of {max_length}")
        self._split, self._pad_id = split, pad_id
        self.rows = [
            part[row].tolist()
            for part in parts or [np.arange(split.num_examples)]
            for row in best_fit(split.lengths[part].tolist(), max_length)
        ]
        self.num_samples, self.max_length = len(self.rows), max_length
        self.tokens_per_sample: float = max_length  # padding included

    def examples(self, sample: int) -> list[int]:
        """The numbers of the examples in a sample."""
        return self.rows[sample]

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        rows = [[self._split.example(number) for number in self.rows[index]] for index in indices.tolist()]
        return batch_of(rows, self.max_length, self._pad_id)


class PaddedExamples:
    """Sample i is example i, padded to the longest of its batch."""

    def __init__(self, split: ExampleSplit, *, max_length: int, pad_id: int) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._pad_id, self.num_samples = split, pad_id, split.num_examples
        self.max_length = int(split.lengths.max(initial=1))
        self.tokens_per_sample = float(split.lengths.mean()) if self.num_samples else 1.0

    def examples(self, sample: int) -> list[int]:
        """Returns the number of the sample's example, as a list of one."""
        return [sample]

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The samples in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples).tolist()
        lengths = self._split.lengths[indices]
        made = batch_of([[self._split.example(index)] for index in indices], int(lengths.max(initial=1)), self._pad_id)
        return PaddedRows.of(made, lengths)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Packs examples into rows of at most `room` tokens; returns the indices into `lengths` of each row.

    Longest first, equal ones in their order; each goes into the row with the least room that is enough.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, index) of the rows that may take another example, sorted
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


def batch_of(rows: Sequence[Sequence[Learnt]], length: int, pad_id: int) -> WholeRows:
    """Rows of `length` tokens, each with its examples one after the other and padding at the end."""
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
    return WholeRows(input_ids, labels, columns - starts, np.cumsum(begins, axis=1, dtype=np.int64) - 1, has_boundaries)


@dataclass(frozen=True, eq=False)
class GroupBatch(WholeRows):
    """P groups of G answers with their prompts: arrays are (P, G, T), with padding at the end.

    `lengths` (P, G) counts the tokens without padding, `values` (P,) are those of the groups, and `reference` (P, G)
    the log-probabilities of the answers under the reference model, if there is one.
    """

    lengths: NDArray[np.int64]
    values: NDArray[np.float32]
    reference: NDArray[np.float32] | None = None

    def given(self) -> dict[str, NDArray[Any]]:
        """Lengths, values and reference."""
        found: dict[str, NDArray[Any]] = {"lengths": self.lengths, "values": self.values}
        return found if self.reference is None else {**found, "reference": self.reference}

    def rows(self, chosen: NDArray[np.int64] | slice) -> GroupBatch:
        """Selects groups and cuts off the padding that all of them share."""
        lengths, values = self.lengths[chosen], self.values[chosen]
        reference = None if self.reference is None else self.reference[chosen]
        cut = (array[chosen][..., : int(lengths.max(initial=1))] for array in self._arrays())
        input_ids, labels, positions, documents = cut
        return GroupBatch(input_ids, labels, positions, documents, self.has_boundaries, lengths, values, reference)


class GroupedExamples:
    """Sample i is group i of a split, padded to the longest answer of its batch.

    With `mismatched`, for KTO, each example is grouped with a second one: its prompt followed by the answer of the next
    example that has another prompt, cut to `max_length` tokens. KTO estimates the divergence from the reference on
    these (Ethayarajh et al. 2024, section 4.1). `reference` (groups, 2) are log-probabilities.
    """

    def __init__(
        self,
        split: ExampleSplit,
        *,
        max_length: int,
        pad_id: int,
        reference: NDArray[np.float32] | None = None,
        mismatched: bool = False,
    ) -> None:
        check_cutting(max_length, pad_id)
        self._split, self._most, self._pad_id = split, max_length, pad_id
        self._reference, self._mismatched = reference, mismatched
        self.num_samples = split.num_groups
        # With `mismatched` an upper bound.
        self.max_length = max_length if mismatched else int(split.lengths.max(initial=1))
        tokens = split.num_tokens * (2 if mismatched else 1)
        self.tokens_per_sample = max(1.0, tokens / max(1, self.num_samples))

    def with_reference(self, reference: NDArray[np.float32]) -> GroupedExamples:
        """The same groups with the log-probabilities (groups, 2) of their answers."""
        return GroupedExamples(
            self._split, max_length=self._most, pad_id=self._pad_id, reference=reference, mismatched=self._mismatched
        )

    def examples(self, sample: int) -> list[int]:
        """The numbers of the examples in a group."""
        size = self._split.group_size
        return list(range(sample * size, (sample + 1) * size))

    def group(self, number: int) -> list[Learnt]:
        """The answers of a group, each after its prompt."""
        if not self._mismatched:
            size = self._split.group_size
            return [self._split.example(number * size + place) for place in range(size)]
        own, other = self._split.example(number), self._split.example(self._others[number])
        prompt, begin = len(own.prompt), len(other.prompt)
        ids = np.concatenate([own.ids[:prompt], other.ids[begin:]])[: self._most]
        supervised = np.concatenate([own.supervised[:prompt], other.supervised[begin:]])[: self._most]
        return [own, Learnt(ids, supervised)]

    @cached_property
    def _others(self) -> list[int]:
        """For each example, the next one with another prompt; the next one if all prompts are equal."""
        count = self._split.num_examples
        prompts = [self._split.example(number).prompt for number in range(count)]
        found = [(number + 1) % count for number in range(count)]
        has_same = [np.array_equal(prompts[number], prompts[other]) for number, other in enumerate(found)]
        if all(has_same):
            return found
        # The second time, the last examples know what follows them at the beginning.
        for number in [*reversed(range(count)), *reversed(range(count))]:
            if has_same[number]:
                found[number] = found[(number + 1) % count]
        return found

    def batch(self, sample_indices: NDArray[np.int64]) -> GroupBatch:
        """The groups in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        groups = [self.group(index) for index in indices.tolist()]
        answers = [[answer] for group in groups for answer in group]
        lengths = np.array([len(answer.ids) for (answer,) in answers], dtype=np.int64)
        made = batch_of(answers, int(lengths.max(initial=1)), self._pad_id)
        shape = (len(groups), len(groups[0]) if groups else 1, made.labels.shape[1])
        arrays = (made.input_ids, made.labels, made.positions, made.document_ids)
        input_ids, labels, positions, documents = (array.reshape(shape) for array in arrays)
        values = np.asarray(self._split.values[indices], dtype=np.float32)
        reference = None if self._reference is None else self._reference[indices]
        of_groups = lengths.reshape(shape[:2])
        return GroupBatch(input_ids, labels, positions, documents, False, of_groups, values, reference)
