"""Learning-rate schedules by optimizer steps: linear warm-up, then one of the courses in a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "piecewise"]
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step of a run.

    Only ``wsd`` reads `decay_steps`, and only ``piecewise`` reads `points`, pairs of a step and a factor.
    """

    name: str
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    total_steps: int
    decay_steps: int = 0
    points: Points = ()

    def __call__(self, step: float) -> float:
        """The rate of step number `step` (0 for the first), which may be a fraction in a run whose pace changed.

        Warm-up step s of W uses ``learning_rate (s + 1) / W``, so that no step is wasted at rate 0. After it the course
        of the schedule gives the share of the way from `min_learning_rate` to `learning_rate`.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * COURSES[self.name](self, step)

    def progress(self, step: float) -> float:
        """The share of the steps after the warm-up that come before `step`: 0 at step W, 1 at `total_steps`."""
        length = max(1, self.total_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / length)


def _cosine(schedule: Schedule, step: float) -> float:
    """Loshchilov and Hutter 2017, equation 5, without restarts."""
    return (1 + math.cos(math.pi * schedule.progress(step))) / 2


def _warmup_stable_decay(schedule: Schedule, step: float) -> float:
    """Full rate, then a decay over the last `decay_steps` (Hägele et al. 2024, the 1-sqrt cooldown)."""
    decayed = step - (schedule.total_steps - schedule.decay_steps)
    return 1 - math.sqrt(min(1.0, max(0, decayed) / max(1, schedule.decay_steps)))


def _inverse_sqrt(schedule: Schedule, step: float) -> float:
    """Vaswani et al. 2017, section 5.3, where steps count from 1, scaled to reach `learning_rate` after warm-up."""
    return math.sqrt(max(1, schedule.warmup_steps) / (step + 1))


def _piecewise(schedule: Schedule, step: float) -> float:
    """Linear interpolation between the points; the first factor before them, the last one after them."""
    steps, factors = zip(*schedule.points, strict=True)
    return float(np.interp(step, steps, factors))


COURSES: dict[str, Callable[[Schedule, float], float]] = {
    "cosine": _cosine,
    "linear": lambda schedule, step: 1 - schedule.progress(step),
    "constant": lambda schedule, step: 1.0,
    "wsd": _warmup_stable_decay,
    "inverse_sqrt": _inverse_sqrt,
    "piecewise": _piecewise,
}


def check_schedule(
    name: str,
    *,
    min_learning_rate: float,
    warmup_steps: int | None,
    decay_steps: int | None,
    points: Points | None,
    max_steps: int | None,
) -> None:
    """Raises `ValueError` for settings that the schedule ignores or that contradict each other."""
    if decay_steps is not None and name != "wsd":
        raise ValueError(f"decay_steps = {decay_steps} is read only by schedule = wsd, not by {name}. Leave it out")
    if points is not None and name != "piecewise":
        raise ValueError(f"schedule_points are read only by schedule = piecewise, not by {name}. Leave them out")
    if name in ("constant", "piecewise") and min_learning_rate > 0:
        raise ValueError(
            f"min_learning_rate = {min_learning_rate} is where a decay ends, but schedule = {name} has none. "
            "Leave it out"
        )
    if name == "wsd":
        _check_phases(warmup_steps or 0, decay_steps or 0, max_steps)
    if name == "inverse_sqrt" and warmup_steps == 0:
        raise ValueError(
            "schedule = inverse_sqrt falls with the steps since its warm-up. Set warmup_steps to at least 1"
        )
    if name == "piecewise":
        _check_points(points, warmup_steps)


def _check_phases(warmup_steps: int, decay_steps: int, max_steps: int | None) -> None:
    if max_steps is not None and warmup_steps + decay_steps > max_steps:
        raise ValueError(
            f"warmup_steps = {warmup_steps} and decay_steps = {decay_steps} do not fit into {max_steps} steps. "
            "Lower them, or train for longer"
        )


def _check_points(points: Points | None, warmup_steps: int | None) -> None:
    if not points:
        raise ValueError("schedule = piecewise needs schedule_points, such as [[0, 0.1], [100, 1.0], [1000, 0.0]]")
    steps = [step for step, _ in points]
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise ValueError(f"schedule_points must be in the order of their steps, each step once, not {steps}")
    if not any(factor for _, factor in points):
        raise ValueError("schedule_points: every factor is 0, so nothing would be learned")
    if warmup_steps:
        raise ValueError(
            f"warmup_steps = {warmup_steps}, but schedule = piecewise has its warm-up in schedule_points. Leave "
            "warmup_steps out"
        )
