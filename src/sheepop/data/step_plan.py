"""The rows that each training step reads, from which sources, and their length, as a function of the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed
from sheepop.data.batches import Batch, Batches, TextBatches
from sheepop.data.mixture_schedule import MixtureSchedule
from sheepop.data.order import SampleOrder
from sheepop.data.shards import DocumentView
from sheepop.data.stages import Stages


@dataclass(frozen=True, eq=False)
class RowSource:
    """Rows in an endless order, cut from a split or, with a `view`, from some of its documents."""

    batches: Batches
    order: SampleOrder
    view: DocumentView | None = None

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges of the split that hold the tokens ``start:stop`` of this source."""
        return self.view.ranges(start, stop) if self.view is not None else [(start, stop)]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step: row b is the sample ``samples[b]`` of source ``sources[b]``, cut into rows of `length`."""

    length: int
    sources: NDArray[np.int64]
    samples: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows of every step from 0 on, a pure function of the step.

    A step reads the next ``sizes.at(step)`` rows of T tokens in each source's order and cuts each into rows of
    ``lengths.at(step)`` tokens. With several sources, `mixture` gives the number of rows from each, and the rows of a
    step are shuffled by a permutation keyed by `seed` and step; with one source, `mixture` is None.
    """

    sources: Sequence[RowSource]
    sizes: Stages
    lengths: Stages
    seed: int
    mixture: MixtureSchedule | None = None

    def __post_init__(self) -> None:
        if len(self.sources) != (1 if self.mixture is None else self.mixture.num_sources):
            raise ValueError(f"{len(self.sources)} sources do not fit the mixture")

    @property
    def num_samples(self) -> int:
        """The number of rows of T tokens in all sources: one epoch."""
        return sum(source.batches.num_samples for source in self.sources)

    @property
    def max_length(self) -> int:
        """T, the most tokens in a row before it is cut."""
        return max(source.batches.max_length for source in self.sources)

    def pieces(self, step: int) -> int:
        """The number of rows into which a step cuts each row of T tokens."""
        return self.max_length // self.lengths.at(step)

    def rows(self, step: int) -> StepRows:
        """The rows of a step, in batch order."""
        length, count = self.lengths.at(step), self.sizes.at(step)
        if self.mixture is None:
            samples = self.sources[0].order.indices(self.sizes.total(step), count)
            return StepRows(length, np.zeros(count, dtype=np.int64), samples)
        bounds = zip(self.sources, self.mixture.taken(step), self.mixture.taken(step + 1), strict=True)
        taken = [source.order.indices(start, stop - start) for source, start, stop in bounds]
        numbers = np.repeat(np.arange(len(taken)), [len(samples) for samples in taken])
        chosen = Permutation(count, derive_seed(self.seed, "mixture order", step))(np.arange(count))
        return StepRows(length, numbers[chosen], np.concatenate(taken)[chosen])

    def batch(self, step: int) -> Batch:
        """The global batch of a step, (B T / length, length)."""
        rows = self.rows(step)
        used = np.unique(rows.sources).tolist()
        parts = [self.sources[number].batches.batch(rows.samples[rows.sources == number]) for number in used]
        batch = parts[0]
        if len(parts) > 1:
            by_source = np.argsort(rows.sources, kind="stable")
            batch = type(batch).joined(parts).rows(np.argsort(by_source))
        return batch.cut(rows.length)

    def token_ranges(self, step: int) -> list[list[tuple[int, int]]]:
        """For each row of a step's batch, the ranges of its tokens in the split; a row of padding has none."""
        found, rows, last = [], self.rows(step), self.pieces(step) - 1
        for number, sample in zip(rows.sources.tolist(), rows.samples.tolist(), strict=True):
            source = self.sources[number]
            assert isinstance(source.batches, TextBatches)
            start, stop = source.batches.token_range(sample)
            for piece in range(last + 1):
                begin = start + piece * rows.length
                end = stop if piece == last else min(begin + rows.length, stop)
                found.append(source.token_ranges(begin, end) if begin < end else [])
        return found
