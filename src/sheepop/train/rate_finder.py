"""The learning-rate range test: one short training at growing rates, until it diverges (Smith 2017, section 3.3).

The loss hardly changes at low rates and grows at high ones; the rate at which it falls fastest is a good one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sheepop.core.errors import SheepOpError
from sheepop.report import smooth

_SPAN = 19.0  # of the means: the weight of a loss is 0.9 times that of its successor
_DIVERGED = 1.5  # the test ends at this many times the lowest mean
_FEWEST_STEPS = 10  # earlier rises of the loss are noise


class RangeTestError(SheepOpError):
    """A range test that found no rate."""


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test: a loss and its smoothed value for every rate, and three rates.

    `suggestion` is the rate at which the smoothed loss falls fastest against the logarithm of the rate, `lowest` the
    rate of the lowest smoothed loss, and `diverged` the rate at which the loss diverged, or None.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float
    lowest: float
    diverged: float | None

    def to_dict(self) -> dict[str, Any]:
        """The test as plain data; a loss that is not finite is null."""
        return {**asdict(self), "losses": [loss if math.isfinite(loss) else None for loss in self.losses]}


def find_learning_rate(
    step: Callable[[float], float],
    *,
    start: float,
    end: float,
    num_steps: int,
    on_step: Callable[[float, float], None] | None = None,
) -> RangeTest:
    """Calls `step`, which takes one training step at a rate and returns the loss before it, at growing rates.

    Rate i of `num_steps` is ``start (end / start)^(i / (num_steps - 1))``. The test ends early if the mean loss exceeds
    1.5 times its lowest value, or the loss is not finite. Raises `RangeTestError` if the loss never fell.
    """
    if not 0 < start < end or num_steps < _FEWEST_STEPS:
        raise ValueError(f"needs 0 < start < end and {_FEWEST_STEPS} steps, got {start}, {end} and {num_steps}")
    rates: list[float] = []
    losses: list[float] = []
    means: list[float] = []
    diverged = None
    for number in range(num_steps):
        rate = start * (end / start) ** (number / (num_steps - 1))
        loss = step(rate)
        if on_step is not None:
            on_step(rate, loss)
        if not math.isfinite(loss):
            diverged = rate
            break
        rates.append(rate)
        losses.append(loss)
        means.append(_means(losses)[-1])
        if number >= _FEWEST_STEPS and means[-1] > _DIVERGED * min(means):
            diverged = rate
            break
    # Over the neighbours on both sides, so that the curve is not shifted to higher rates.
    smoothed = [(left + right) / 2 for left, right in zip(means, _means(losses[::-1])[::-1], strict=True)]
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__) if smoothed else 0
    if lowest == 0:
        raise RangeTestError(
            f"The loss did not fall at any learning rate from {start:g} on. Start lower, or take more steps."
        )
    return RangeTest(rates, losses, smoothed, rates[_steepest(rates, smoothed, lowest)], rates[lowest], diverged)


def _means(losses: list[float]) -> list[float]:
    """The running means of the losses, in which later losses weigh more."""
    return [mean for mean in smooth(losses, _SPAN) if mean is not None]


def _steepest(rates: list[float], smoothed: list[float], lowest: int) -> int:
    """The index, up to that of the lowest loss, at which the loss falls fastest against the logarithm of the rate."""

    def slope(index: int) -> float:
        left, right = max(0, index - 1), min(lowest, index + 1)
        return (smoothed[right] - smoothed[left]) / math.log(rates[right] / rates[left])

    return min(range(lowest + 1), key=slope)
