"""The rows that each training step reads, from which sources, in which order, and their length, by the step alone.

The number of rows from each source: the target of source i after s steps is ``C_i(s) = sum over t < s of
B_t w_i(t) / sum_j w_j(t)``, where step t has B_t rows. The integer count N_i(s) differs from the target by at most one
row, never decreases, and sums over i to all rows of the steps. Rounding each step on its own cannot guarantee that.
Instead, row m of a source has a step before which it is too early (``C_i <= m - 1``) and a step by which it is due
(``C_i >= m``), and rows are taken in the order of their due steps. The fractional targets meet these bounds, so integer
counts can, too (compare Tijdeman 1980, "The chairman assignment problem").
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed
from sheepop.data.batches import Batch, Batches, TextBatches
from sheepop.data.shards import DocumentView


@dataclass(frozen=True)
class Stages:
    """The value at every step: each pair (until, value) of `stages` covers the steps before `until`; then `final`.

    Steps count from 0. With ``Stages(((10, 4), (30, 8)), 16)`` the value is 4 at steps 0 to 9, 8 at steps 10 to 29,
    and 16 afterwards. Raises ValueError unless the steps increase and all values are at least 1.
    """

    stages: tuple[tuple[int, int], ...]
    final: int

    def __post_init__(self) -> None:
        untils = [0, *(until for until, _ in self.stages)]
        if any(later <= earlier for earlier, later in pairwise(untils)):
            raise ValueError(f"the steps of stages must increase, got {untils[1:]}")
        if min([self.final, *(value for _, value in self.stages)]) < 1:
            raise ValueError("the values of stages must be at least 1")

    @property
    def last_change(self) -> int:
        """The first step at which the value is `final`."""
        return self.stages[-1][0] if self.stages else 0

    def at(self, step: int) -> int:
        """The value at one step."""
        return next(value for _, end, value in self._spans() if step < end)

    def total(self, steps: int) -> int:
        """The sum of the values of the steps ``0 .. steps - 1``."""
        return sum(value * (min(steps, end) - begin) for begin, end, value in self._spans() if begin < steps)

    def steps_to(self, total: float) -> int:
        """The smallest number of steps whose values add up to at least `total`."""
        needed, passed = math.ceil(total), 0  # integers, so that no division rounds
        for begin, end, value in self._spans():
            if passed + value * (end - begin) >= needed:
                return begin + max(0, -(-(needed - passed) // value))
            passed += value * (end - begin)
        return self.last_change - (passed - needed) // self.final

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(begin, end, value) of every stage; the last one has no real end."""
        begin = 0
        for until, value in self.stages:
            yield begin, until, value
            begin = until
        yield begin, 2**63, self.final


class SampleOrder:
    """An endless order of the samples ``0 .. num_samples - 1``; epoch e is a permutation keyed by (seed, e).

    It has no state: the sample depends on the position alone, so one integer resumes it for any number of workers,
    ranks or accumulated micro-batches.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at the positions ``start .. start + count - 1``, ``(count,)``."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        result = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(start + filled, self.num_samples)
            size = min(count - filled, self.num_samples - offset)
            places = np.arange(offset, offset + size, dtype=np.int64)
            result[filled : filled + size] = self._of_epoch(epoch, places)
            filled += size
        return result

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at `places` of one epoch."""
        return Permutation(self.num_samples, derive_seed(self.seed, "data order", epoch))(places)


class PartOrder(SampleOrder):
    """An endless order of some `samples` (N,) of many."""

    def __init__(self, samples: NDArray[np.int64], seed: int) -> None:
        super().__init__(len(samples), seed)
        self._samples = samples

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._samples[super()._of_epoch(epoch, places)]


class EasyToHardOrder(SampleOrder):
    """The first `epochs` epochs go from easy to hard; later ones are those of `SampleOrder`.

    Samples are ranked by `difficulty` (N,), with random ties. Each epoch sorts by rank / N plus a keyed random number
    from ``-jitter / 2`` to ``jitter / 2``, so no sample moves from its rank by more than the share `jitter` of an epoch
    (Bengio et al. 2009, "Curriculum learning").
    """

    def __init__(self, difficulty: NDArray[np.float64], seed: int, *, epochs: int, jitter: float) -> None:
        super().__init__(len(difficulty), seed)
        self._epochs, self._jitter = epochs, jitter
        ties = np.random.Philox(key=derive_seed(seed, "difficulty ties")).random_raw(len(difficulty))
        self._ranked = np.lexsort((ties, difficulty)).astype(np.int64)
        self._sorted: tuple[int, NDArray[np.int64]] | None = None  # the last epoch that was computed

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if epoch >= self._epochs:
            return super()._of_epoch(epoch, places)
        found = self._sorted
        if found is None or found[0] != epoch:
            key = derive_seed(self.seed, "difficulty jitter", epoch)
            draws = np.random.Philox(key=key).random_raw(self.num_samples)
            moved = np.arange(self.num_samples) / self.num_samples + self._jitter * (draws / 2.0**64 - 0.5)
            found = self._sorted = epoch, self._ranked[np.argsort(moved, kind="stable")]
        return found[1][places]


# Targets are integers in units of 1 / _UNIT row, so that their sums are exact.
_UNIT = 2**64
Knots = Sequence[tuple[int, float]]


def first_empty_step(knots: Sequence[Knots]) -> int | None:
    """The first knot at which all weights are 0, if any; checking knots is enough, as weights are linear between."""
    steps = np.array(sorted({0, *(at for points in knots for at, _ in points)}))
    empty = steps[_weights(knots, steps).sum(axis=1) == 0]
    return int(empty[0]) if empty.size else None


class MixtureSchedule:
    """The cumulative rows of each of k sources before any step, from the `knots` of the weights and the step sizes.

    A pure function of the step; its table caches the steps computed so far. Raises ValueError if all weights are 0 at
    some step.
    """

    def __init__(self, knots: Sequence[Knots], sizes: Stages) -> None:
        if (empty := first_empty_step(knots)) is not None:
            raise ValueError(f"all weights are 0 at step {empty}")
        self.num_sources, self._sizes = len(knots), sizes
        self._last = max([sizes.last_change, *(at for points in knots for at, _ in points)])
        weights = _weights(knots, np.arange(self._last + 1))
        shares = (weights / weights.sum(axis=1, keepdims=True)).tolist()
        # The targets after 0, 1, ... steps, up to the last change of weights or sizes.
        *changing, self._final_quotas = (_quotas(row, sizes.at(step)) for step, row in enumerate(shares))
        self._targets = [[0, *accumulate(quotas)] for quotas in zip(*changing, strict=True)] or [[0] for _ in knots]
        self._taken = array("q", [0] * len(knots))  # k counts per step
        self._lock = threading.Lock()

    def taken(self, step: int) -> list[int]:
        """The number of rows that each source has given to the steps before `step`, ``(k,)``."""
        begin = step * self.num_sources
        with self._lock:
            while len(self._taken) <= begin:
                self._taken.extend(self._next_counts())
            return self._taken[begin : begin + self.num_sources].tolist()

    def _next_counts(self) -> list[int]:
        """The counts for the step after the last one in the table."""
        step = len(self._taken) // self.num_sources
        targets = [self._target(source, step) for source in range(self.num_sources)]
        before = self._taken[-self.num_sources :]
        counts = [max(taken, target // _UNIT) for taken, target in zip(before, targets, strict=True)]
        ahead = [count * _UNIT - target for count, target in zip(counts, targets, strict=True)]
        started = [source for source, more in enumerate(ahead) if more < 0]
        started.sort(key=lambda source: (self._due(source, counts[source] + 1), ahead[source], source))
        for source in started[: self._sizes.total(step) - sum(counts)]:
            counts[source] += 1
        return counts

    def _target(self, source: int, step: int) -> int:
        later = max(0, step - self._last)
        return self._targets[source][step - later] + later * self._final_quotas[source]

    def _due(self, source: int, count: int) -> float:
        """The first step after which the target of a source is at least `count` rows."""
        targets, wanted = self._targets[source], count * _UNIT
        if targets[-1] >= wanted:
            return bisect_left(targets, wanted)
        quota = self._final_quotas[source]
        return self._last - (targets[-1] - wanted) // quota if quota else math.inf


def _quotas(shares: list[float], rows: int) -> list[int]:
    """The target increments of a step with `rows` rows; the largest share gets the rounding remainder."""
    whole = rows * _UNIT
    parts = [int(share * whole) for share in shares]
    parts[shares.index(max(shares))] += whole - sum(parts)
    return parts


def _weights(knots: Sequence[Knots], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weights at `steps`, linear between knots and constant outside, ``(steps, k)``."""
    lines = [np.interp(steps, [at for at, _ in points], [weight for _, weight in points]) for points in knots]
    return np.stack(lines, axis=1)


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
class BatchSchedule:
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
        return sum(source.order.num_samples for source in self.sources)

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
        rows, shared = self.rows(step), self.sources[0].batches
        if all(source.batches is shared for source in self.sources):
            return shared.batch(rows.samples).cut(rows.length)
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
