"""Times with intervals: of a step from steps that were timed, and of a run from those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sheepop.core.budget import Budget
from sheepop.core.random import numpy_generator

_DRAWS = 1000
# The mean of the same steps differs by so much between two processes on a quiet machine.
_DRIFT = 0.05
_COVERED = 0.95
# What a run does besides its steps is measured once, and some of it while steps are taken.
_OFF = 0.25


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its interval."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Interval:
        """The interval of ``factor * x``; the factor is not negative."""
        return Interval(*(factor * value for value in (self.low, self.middle, self.high)))


def mean_interval(seconds: Sequence[float]) -> Interval:
    """The mean of timed steps with its 95 percent interval.

    Its bounds are percentiles of the means of 1,000 samples drawn with replacement (Efron 1979), widened to the means
    of the first and the second half, and then by `_DRIFT`, because the speed of a machine also drifts. Raises
    `ValueError` for fewer than two times.
    """
    times = np.asarray(seconds, np.float64)
    if len(times) < 2:
        raise ValueError(f"an interval needs two times or more, got {len(times)}")
    drawn = numpy_generator(0, "interval of steps").integers(len(times), size=(_DRAWS, len(times)))
    low, high = np.quantile(times[drawn].mean(axis=1), [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    halves = [float(half.mean()) for half in np.array_split(times, 2)]
    least, most = min(float(low), *halves), max(float(high), *halves)
    return Interval((1 - _DRIFT) * least, float(times.mean()), (1 + _DRIFT) * most)


@dataclass(frozen=True)
class Course:
    """How long a run takes: `step` seconds each of `steps`, and `besides` by part for what is not a step.

    Steps have `tokens` and `flops` each. Beside other programs they got the share `quiet` of the processors, with which
    a machine that becomes quiet multiplies all times. `usd_per_hour` is the price of the machine, None if it is not
    known.
    """

    steps: int
    step: Interval
    besides: Mapping[str, float]
    tokens: float
    flops: float
    usd_per_hour: float | None = None
    quiet: float = 1.0

    @property
    def rest(self) -> Interval:
        """The seconds of all that is not a step."""
        whole = sum(self.besides.values())
        return Interval((1 - _OFF) * whole, whole, (1 + _OFF) * whole)

    @property
    def seconds(self) -> Interval:
        """The time of the run while the machine is as busy as now; the lower bound is without other programs."""
        steps, rest = self.step.times(self.steps), self.rest
        return Interval(self.quiet * (steps.low + rest.low), steps.middle + rest.middle, steps.high + rest.high)

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
        step, rest, quiet = self.step, self.rest, self.quiet
        ends = (step.high, rest.high), (step.middle, rest.middle), (quiet * step.low, quiet * rest.low)
        fewest, middle, most = (int(max(0.0, seconds - besides) // each) for each, besides in ends)
        return fewest, middle, most
