"""Which rows of which sources every training step reads, and how long they are: a function of the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed
from sheepop.data.batches import Batch, Batches, TextBatches
from sheepop.data.mixture_schedule import MixtureSchedule
from sheepop.data.order import Order
from sheepop.data.stages import Stages
from sheepop.data.views import DocumentView


@dataclass(frozen=True, eq=False)
class RowSource:
    """Rows that steps read in an endless order, cut from a split or, through a `view`, from some of its documents."""

    batches: Batches
    order: Order
    view: DocumentView | None = None

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens ``start:stop`` of what the rows are cut from stand in the split."""
        return self.view.ranges(start, stop) if self.view is not None else [(start, stop)]


@dataclass(frozen=True, eq=False)
class StepRows:
    """What one step reads: row b is the sample ``samples[b]`` of the source ``sources[b]``, each cut to `length`."""

    step: int
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
        counts, starts = self._takes(step)
        taken = [
            source.order.indices(start, count)
            for source, start, count in zip(self.sources, starts, counts, strict=True)
        ]
        numbers = np.repeat(np.arange(len(self.sources)), counts)
        chosen = self._arrangement(step, len(numbers))
        return StepRows(step, self.lengths.at(step), numbers[chosen], np.concatenate(taken)[chosen])

    def batch(self, step: int) -> Batch:
        """The global batch of a step, (B T / length, length)."""
        rows = self.rows(step)
        parts, places = [], []
        for number, source in enumerate(self.sources):
            (here,) = np.nonzero(rows.sources == number)
            if here.size:
                parts.append(source.batches.batch(rows.samples[here]))
                places.append(here)
        batch = parts[0]
        if len(parts) > 1:
            batch = type(batch).joined(parts).rows(np.argsort(np.concatenate(places)))
        return batch.cut(rows.length)

    def token_ranges(self, step: int) -> list[list[tuple[int, int]]]:
        """For each row of a step's batch, where its tokens stand in the split; a row of padding has none."""
        found, rows = [], self.rows(step)
        for number, sample in zip(rows.sources.tolist(), rows.samples.tolist(), strict=True):
            source = self.sources[number]
            assert isinstance(source.batches, TextBatches)
            start, stop = source.batches.token_range(sample)
            if self.pieces(step) == 1:
                found.append(source.token_ranges(start, stop))
                continue
            for begin in range(start, start + self.max_length, rows.length):
                end = min(begin + rows.length, stop)
                found.append(source.token_ranges(begin, end) if begin < end else [])
        return found

    def _takes(self, step: int) -> tuple[list[int], list[int]]:
        """How many rows each source gives to a step, and from which place of its order on."""
        if self.mixture is None:
            return [self.sizes.at(step)], [self.sizes.total(step)]
        before, after = self.mixture.taken(step), self.mixture.taken(step + 1)
        return [late - early for early, late in zip(before, after, strict=True)], before

    def _arrangement(self, step: int, size: int) -> NDArray[np.int64]:
        places = np.arange(size, dtype=np.int64)
        if self.mixture is None:
            return places
        return Permutation(size, derive_seed(self.seed, "mixture order", step))(places)
