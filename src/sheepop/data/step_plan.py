"""Which rows of which sources every training step reads, and how long they are: a function of the step alone."""

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
    """Rows that steps read in an endless order, cut from a split or, through a `view`, from some of its documents."""

    batches: Batches
    order: SampleOrder
    view: DocumentView | None = None

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens ``start:stop`` of what the rows are cut from stand in the split."""
        return self.view.ranges(start, stop) if self.view is not None else [(start, stop)]


@dataclass(frozen=True, eq=False)
class StepRows:
    """What one step reads: row b is the sample ``samples[b]`` of the source ``sources[b]``, each cut to `length`."""

    length: int
    sources: NDArray[np.int64]
    samples: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows of every step from 0 on; whoever asks, in whatever order, gets the same.

    A step reads ``sizes.at(step)`` rows of T tokens, the next ones of each source's order, and cuts each into rows of
    ``lengths.at(step)`` tokens. With one source there is no `mixture`; with several it says how many rows each gives,
    and they stand in a step in an order keyed by `seed` and step.
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
        """How many rows of T tokens all sources have: an epoch."""
        return sum(source.batches.num_samples for source in self.sources)

    @property
    def max_length(self) -> int:
        """T, the most tokens of a row that is not cut."""
        return max(source.batches.max_length for source in self.sources)

    def pieces(self, step: int) -> int:
        """How many rows of a step's batch one row of T tokens gives."""
        return self.max_length // self.lengths.at(step)

    def rows(self, step: int) -> StepRows:
        """The rows of a step, in the order of its batch."""
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
        """For each row of a step's batch, where its tokens stand in the split; a row of padding has none."""
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
