"""The schedule of a run: its learning rate at every step, and its number of steps, which may follow the clock.

The rate has a linear warm-up and then one of the courses in a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "piecewise"]
Points = Sequence[tuple[int, float]]
_LOOKS = 20  # number of regular looks at the clock, evenly over the plan
_FAR_OFF = 0.01  # a run that is late or early by more than this share of its time looks at the clock at once
_TOLERANCE = 0.03  # a change of at most this share of the remaining steps is not made
_NEGLIGIBLE = 0.01  # neither is a change of at most this share of the planned steps


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
        """Returns the share of the steps after the warm-up that are before `step`: 0 at step W, 1 at `total_steps`."""
        length = max(1, self.total_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / length)


def _cosine(schedule: Schedule, step: float) -> float:
    """Half a cosine (Loshchilov and Hutter 2017, equation 5, without restarts)."""
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
    warmup, decay = warmup_steps or 0, decay_steps or 0
    if name == "wsd" and max_steps is not None and warmup + decay > max_steps:
        raise ValueError(
            f"warmup_steps = {warmup} and decay_steps = {decay} do not fit into {max_steps} steps. "
            "Lower them, or train for longer"
        )
    if name == "inverse_sqrt" and warmup_steps == 0:
        raise ValueError(
            "schedule = inverse_sqrt falls with the steps since its warm-up. Set warmup_steps to at least 1"
        )
    if name == "piecewise":
        _check_points(points, warmup_steps)


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


@dataclass(frozen=True)
class Pace:
    """The steps of a run: the number `planned` before it began, and the `revisions` of that number.

    A revision (step, total) spreads the rest of the plan after `step` over the steps up to `total`. So every run goes
    through its whole schedule, in fewer or in more steps.
    """

    planned: int
    revisions: tuple[tuple[int, int], ...] = ()

    @property
    def total_steps(self) -> int:
        """The steps of the run after all revisions."""
        return self.revisions[-1][1] if self.revisions else self.planned

    def place(self, step: int) -> float:
        """The position in the plan after `step` steps: 0 at the beginning, `planned` at the end."""
        since, place, total = 0, 0.0, self.planned
        for revised, new_total in self.revisions:
            if revised >= step:
                break
            place += (revised - since) * (self.planned - place) / (total - since)
            since, total = revised, new_total
        return place + (step - since) * (self.planned - place) / (total - since)

    def revised(self, step: int, total: int) -> Pace:
        """This pace with a revision: `total` steps in all, from `step` on."""
        return replace(self, revisions=(*self.revisions, (step, total)))


class _Look(NamedTuple):
    step: int
    seconds: float


@dataclass
class Deadline:
    """Computes how many steps fit into the `seconds` of a run, at most the `most_steps` of other budgets.

    The loop calls `record` with every change before it takes a step by it. The clock is read every twentieth of the
    plan, and at once if the run is far too slow or too fast. The work after the loop takes `after` seconds if steps
    take as long as planned, and likewise longer on a machine that became slower, up to `most_after`; the loop ends
    earlier then.
    """

    seconds: float
    most_steps: int | None
    record: Callable[[Pace], None]
    after: float = 0.0
    most_after: float = math.inf
    _looks: list[_Look] = field(default_factory=list, init=False)

    def revise(self, pace: Pace, step: int, seconds: float, ending: float) -> Pace | None:
        """Returns the new pace of a run that took `step` steps in `seconds`, or None to keep the present pace.

        Call it after every step. The time of a step is the mean since the look before the last, including validations
        and checkpoints; if the run is suddenly far off, since the last look. `ending` seconds are reserved for the work
        after the last step.
        """
        if not self._looks or step <= self._looks[-1].step:  # a run may rewind and repeat steps
            self._looks = [_Look(step, seconds)]
            return None
        last = self._looks[-1]
        share = (step - last.step) / (pace.total_steps - last.step)
        late = seconds - last.seconds - share * (self.seconds - last.seconds)
        is_far_off = abs(late) > _FAR_OFF * self.seconds + ending  # a single validation does not count
        if not is_far_off and pace.place(step) - pace.place(last.step) < pace.planned / _LOOKS:
            return None
        looks = self._looks[-1:] if is_far_off else self._looks[-2:]
        is_first = len(self._looks) == 1  # too short for its share of validations to be typical
        self._looks = [last, _Look(step, seconds)]
        revised = pace.revisions[-1][0] if pace.revisions else 0  # a new revision must come later
        if step <= revised or (is_first and not is_far_off):
            return None
        step_seconds = (seconds - looks[0].seconds) / (step - looks[0].step)
        slower = step_seconds * pace.planned / self.seconds
        longer = max(0.0, min(slower * self.after, self.most_after) - self.after)
        total = step + max(1, math.floor((self.seconds - seconds - ending - longer) / step_seconds))
        if self.most_steps is not None:
            total = max(step + 1, min(total, self.most_steps))
        to_go = pace.total_steps - step
        if abs(total - pace.total_steps) <= max(_TOLERANCE * to_go, _NEGLIGIBLE * pace.planned):
            return None
        return pace.revised(step, total)
