"""The pace of a run: its planned number of steps, and the changes by which it keeps to its minutes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

_LOOKS = 20  # number of regular looks at the clock, evenly over the plan
_FAR_OFF = 0.01  # a run that is late or early by more than this share of its time looks at the clock at once
_TOLERANCE = 0.03  # a change of at most this share of the remaining steps is not made
_NEGLIGIBLE = 0.01  # neither is a change of at most this share of the planned steps


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

    @property
    def is_settled_until(self) -> int:
        """The step of the last revision; a new revision must come later."""
        return self.revisions[-1][0] if self.revisions else 0

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


class Deadline:
    """Computes how many steps fit into the `seconds` of a run, at most the `most_steps` of other budgets.

    The loop calls `record` with every change before it takes a step by it. The clock is read every twentieth of the
    plan, and at once if the run is far too slow or too fast.
    """

    def __init__(self, seconds: float, most_steps: int | None, record: Callable[[Pace], None]) -> None:
        self.seconds, self.most_steps, self.record = seconds, most_steps, record
        self._looks: list[_Look] = []

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
        if step <= pace.is_settled_until or (is_first and not is_far_off):
            return None
        step_seconds = (seconds - looks[0].seconds) / (step - looks[0].step)
        total = step + max(1, math.floor((self.seconds - seconds - ending) / step_seconds))
        if self.most_steps is not None:
            total = max(step + 1, min(total, self.most_steps))
        to_go = pace.total_steps - step
        if abs(total - pace.total_steps) <= max(_TOLERANCE * to_go, _NEGLIGIBLE * pace.planned):
            return None
        return pace.revised(step, total)
