"""The number of rows that each source gives to every step of a run while the weights of the sources change.

The target of source i after s steps is ``C_i(s) = sum over t < s of B_t w_i(t) / sum_j w_j(t)``, where step t has B_t
rows. The integer count N_i(s) differs from the target by at most one row, never decreases, and sums over i to all rows
of the steps. Rounding each step on its own cannot guarantee that. Instead, row m of a source has a step before which
it is too early (``C_i <= m - 1``) and a step by which it is due (``C_i >= m``), and rows are taken in the order of
their due steps. The fractional targets meet these bounds, so integer counts can, too (compare Tijdeman 1980, "The
chairman assignment problem").
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from sheepop.data.stages import Stages

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
