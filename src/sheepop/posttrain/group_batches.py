"""Batches of answers that are compared: the chosen one with the rejected one, or one with another prompt's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.data import Batch
from sheepop.data.batches import check_cutting, check_indices
from sheepop.posttrain.example_batches import batch_of
from sheepop.posttrain.example_store import ExampleSplit, Learnt


@dataclass(frozen=True, eq=False)
class GroupBatch(Batch):
    """P groups of G answers: arrays are (P, G, T), and padding is behind every answer.

    `lengths` (P, G) counts the tokens without padding, `values` (P,) are those of the groups, and `reference` (P, G)
    the log-probabilities of the answers under the reference, where there is one.
    """

    lengths: NDArray[np.int64]
    values: NDArray[np.float32]
    reference: NDArray[np.float32] | None = None

    def given(self) -> dict[str, NDArray[Any]]:
        """Lengths, values and reference."""
        found: dict[str, NDArray[Any]] = {"lengths": self.lengths, "values": self.values}
        return found if self.reference is None else {**found, "reference": self.reference}

    def rows(self, chosen: NDArray[np.int64] | slice) -> GroupBatch:
        """The chosen groups, without the padding that all of them have."""
        lengths = self.lengths[chosen]
        length = int(lengths.max(initial=1))
        return GroupBatch(
            self.input_ids[chosen][..., :length],
            self.labels[chosen][..., :length],
            self.positions[chosen][..., :length],
            self.document_ids[chosen][..., :length],
            self.has_boundaries,
            lengths,
            self.values[chosen],
            None if self.reference is None else self.reference[chosen],
        )

    def cut(self, length: int) -> Batch:
        """The batch as it is: groups are made no longer than rows may be."""
        return self


class GroupedExamples:
    """Sample i is the group i of a split, padded to the longest answer of its batch.

    With `mismatched` the examples of the split stand alone, and each is grouped with its prompt in front of the answer
    of the next one, at most `max_length` tokens of them: what such answers are worth tells how far a policy is from
    the reference (KTO, Ethayarajh et al. 2024, section 4.1). `reference` (groups, 2) are log-probabilities.
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

    @property
    def num_samples(self) -> int:
        """The number of groups."""
        return self._split.num_groups

    @property
    def max_length(self) -> int:
        """The most tokens that an answer with its prompt may have here."""
        return self._most if self._mismatched else int(self._split.lengths.max(initial=1))

    @property
    def tokens_per_sample(self) -> float:
        """The mean of the groups."""
        tokens = self._split.num_tokens * (2 if self._mismatched else 1)
        return max(1.0, tokens / max(1, self.num_samples))

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
        """The answers of a group, each behind its prompt."""
        if not self._mismatched:
            size = self._split.group_size
            return [self._split.example(number * size + place) for place in range(size)]
        own, other = self._split.example(number), self._split.example((number + 1) % self._split.num_examples)
        prompt, begin = int(np.argmax(own.supervised)), int(np.argmax(other.supervised))
        ids = np.concatenate([own.ids[:prompt], other.ids[begin:]])[: self._most]
        supervised = np.concatenate([own.supervised[:prompt], other.supervised[begin:]])[: self._most]
        return [own, Learnt(ids, supervised)]

    def batch(self, sample_indices: NDArray[np.int64]) -> GroupBatch:
        """The groups in the order given; raises IndexError for one that does not exist."""
        indices = check_indices(sample_indices, self.num_samples)
        groups = [self.group(index) for index in indices.tolist()]
        answers = [[answer] for group in groups for answer in group]
        lengths = np.array([len(answer.ids) for (answer,) in answers], dtype=np.int64)
        made = batch_of(answers, int(lengths.max(initial=1)), self._pad_id)
        shape = (len(groups), len(groups[0]) if groups else 1, made.labels.shape[1])
        return GroupBatch(
            made.input_ids.reshape(shape),
            made.labels.reshape(shape),
            made.positions.reshape(shape),
            made.document_ids.reshape(shape),
            False,
            lengths.reshape(shape[:2]),
            np.asarray(self._split.values[indices], dtype=np.float32),
            None if self._reference is None else self._reference[indices],
        )
