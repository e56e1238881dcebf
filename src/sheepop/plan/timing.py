"""Times with intervals: of a step from steps that were timed, and of a run from those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sheepop.core.random import numpy_generator
from sheepop.plan.budget import Budget

_DRAWS = 1000
_COVERED = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its interval."""

    low: float
    middle: float
    high: float

    def times(self, factor: float, added: float = 0.0) -> Interval:
        """The interval of ``factor * x + added``; the factor is not negative."""
        return Interval(*(factor * value + added for value in (self.low, self.middle, self.high)))


def mean_interval(seconds: Sequence[float]) -> Interval:
    """The mean of timed steps with its 95 percent interval.

    Its bounds are percentiles of the means of 1,000 samples drawn with replacement (Efron 1979), widened to the means
    of the first and the second half, because the speed of a machine also drifts. Raises `ValueError` for fewer than two
    times.
    """
    times = np.asarray(seconds, np.float64)
    if len(times) < 2:
        raise ValueError(f"an interval needs two times or more, got {len(times)}")
    drawn = numpy_generator(0, "interval of steps").integers(len(times), size=(_DRAWS, len(times)))
    low, high = np.quantile(times[drawn].mean(axis=1), [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    halves = [float(half.mean()) for half in np.array_split(times, 2)]
    return Interval(min(float(low), *halves), float(times.mean()), max(float(high), *halves))


@dataclass(frozen=True)
class Course:
    """How long a run takes: `step` seconds each of `steps`, and `besides` in all for what is not a step.

    Steps have `tokens` and `flops` each. `usd_per_hour` is the price of the machine, None if it is not known.
    """

    steps: int
    step: Interval
    besides: float
    tokens: float
    flops: float
    usd_per_hour: float | None = None

    @property
    def seconds(self) -> Interval:
        """The time of the run."""
        return self.step.times(self.steps, self.besides)

    @property
    def usd(self) -> Interval | None:
        """The cost of the run."""
        return None if self.usd_per_hour is None else self.seconds.times(self.usd_per_hour / 3600)

    def steps_within(self, budget: Budget) -> tuple[int, int, int] | None:
        """The steps that fit into a budget: at the slow end of the interval, in its middle, at the fast end.

        None for a budget in dollars without a price.
        """
        if budget.kind == "flops":
            return (int(budget.amount // self.flops),) * 3
        seconds = budget.amount
        if budget.kind == "usd":
            if self.usd_per_hour is None:
                return None
            seconds = budget.amount / self.usd_per_hour * 3600
        left = max(0.0, seconds - self.besides)
        return int(left // self.step.high), int(left // self.step.middle), int(left // self.step.low)
