"""The learning-rate range test: one short training at an ever higher rate, until it diverges (Smith 2017, section 3.3).

Too low a rate leaves the loss where it is, too high a one makes it grow; where it falls fastest is a good rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sheepop.core.errors import SheepOpError
from sheepop.report import smooth

_SPAN = 19.0  # of the means: a loss weighs 0.9 times its successor
_DIVERGED = 1.5  # times the lowest mean
_FEWEST_STEPS = 10  # before a rise of the loss means anything


class RangeTestError(SheepOpError):
    """A range test from which no rate follows."""


@dataclass(frozen=True)
class RangeTest:
    """What a range test found: a loss and its smoothed value for every rate, and the rates that follow.

    `suggestion` is where the smoothed loss falls fastest against the logarithm of the rate, `lowest` where it was
    lowest, and `diverged` where the test ended, None when it did not diverge.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float
    lowest: float
    diverged: float | None

    def to_dict(self) -> dict[str, Any]:
        """The test as plain data; a loss that is no number is null."""
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

    Rate i of `num_steps` is ``start (end / start)^(i / (num_steps - 1))``. The test ends early when the smoothed
    loss is 1.5 times its lowest value, or the loss is no number. Raises `RangeTestError` when the loss never fell.
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
    smoothed = _smoothed(losses)
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__) if smoothed else 0
    if lowest == 0:
        raise RangeTestError(
            f"The loss did not fall at any learning rate from {start:g} on. Start lower, or take more steps."
        )
    return RangeTest(rates, losses, smoothed, rates[_steepest(rates, smoothed, lowest)], rates[lowest], diverged)


def _smoothed(losses: list[float]) -> list[float]:
    """Means over the neighbours on both sides, so that the curve stays over its rates."""
    before, after = _means(losses), _means(losses[::-1])[::-1]
    return [(left + right) / 2 for left, right in zip(before, after, strict=True)]


def _means(losses: list[float]) -> list[float]:
    """The mean of the losses so far, late ones weighing more."""
    return [mean for mean in smooth(losses, _SPAN) if mean is not None]


def _steepest(rates: list[float], smoothed: list[float], lowest: int) -> int:
    """The place up to the lowest loss where the loss falls fastest against the logarithm of the rate."""

    def slope(place: int) -> float:
        left, right = max(0, place - 1), min(lowest, place + 1)
        return (smoothed[right] - smoothed[left]) / math.log(rates[right] / rates[left])

    return min(range(lowest + 1), key=slope)
