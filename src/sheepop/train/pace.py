"""How a run keeps to its minutes: the steps that were planned, and what the clock makes of them on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

_LOOKS = 20  # at the clock, evenly over the plan
_FAR_OFF = 0.01  # the share of the time by which a run is late, or early, that calls for another
_TOLERANCE = 0.03  # the share of the steps to go by which the plan may be wrong
_NEGLIGIBLE = 0.01  # the share of all steps that is not worth a change


@dataclass(frozen=True)
class Pace:
    """The steps of a run: `planned` before it began, and the `revisions` of that.

    A revision (step, total) spreads what is left of the plan at `step` over the steps up to `total`. So every run goes
    through the whole course of its schedule, in fewer steps or in more.
    """

    planned: int
    revisions: tuple[tuple[int, int], ...] = ()

    @property
    def total_steps(self) -> int:
        """The steps of the run as things stand."""
        return self.revisions[-1][1] if self.revisions else self.planned

    @property
    def is_settled_until(self) -> int:
        """The step from which on the plan may be changed: what was decided for steps before stays."""
        return self.revisions[-1][0] if self.revisions else 0

    def place(self, step: int) -> float:
        """Where in the plan a run is that has taken `step` steps: 0 at its beginning, `planned` at its end."""
        since, place, total = 0, 0.0, self.planned
        for revised, new_total in self.revisions:
            if revised >= step:
                break
            place += (revised - since) * (self.planned - place) / (total - since)
            since, total = revised, new_total
        return place + (step - since) * (self.planned - place) / (total - since)

    def revised(self, step: int, total: int) -> Pace:
        """With `total` steps in all, from `step` on."""
        return replace(self, revisions=(*self.revisions, (step, total)))


class _Look(NamedTuple):
    step: int
    seconds: float


class Deadline:
    """Says how many steps fit into the `seconds` that a run has; at most `most_steps`, which other budgets set.

    `record` hears of every change before a step is taken by it. The clock is looked at every twentieth of the plan, and
    at once when the run is far from where it should be.
    """

    def __init__(self, seconds: float, most_steps: int | None, record: Callable[[Pace], None]) -> None:
        self.seconds, self.most_steps, self.record = seconds, most_steps, record
        self._looks: list[_Look] = []

    def revise(self, pace: Pace, step: int, seconds: float, ending: float) -> Pace | None:
        """The pace of a run that has taken `step` steps in `seconds`; None while the present one will do.

        It is asked after every step. How long one takes is the mean since the look before the last, with validations
        and checkpoints; since the last one, when something has changed just now. `ending` seconds are kept free for
        what is due behind the last step.
        """
        if not self._looks or step <= self._looks[-1].step:  # a run may go back, and take steps anew
            self._looks = [_Look(step, seconds)]
            return None
        last = self._looks[-1]
        share = (step - last.step) / (pace.total_steps - last.step)
        late = seconds - last.seconds - share * (self.seconds - last.seconds)
        is_far_off = abs(late) > _FAR_OFF * self.seconds + ending  # one validation is no reason
        if not is_far_off and pace.place(step) - pace.place(last.step) < pace.planned / _LOOKS:
            return None
        looks = self._looks[-1:] if is_far_off else self._looks[-2:]
        is_first = len(self._looks) == 1  # too short a time for the validations in it to stand for all
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
