"""Learning-rate schedules, counted in optimizer steps: linear warm-up, then one of a table of decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant"]

# Share of the way from min_learning_rate to learning_rate, as a function of progress in [0, 1] after warm-up.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,  # Loshchilov and Hutter 2017, equation 5
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step of a run."""

    name: str
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """The rate that step number `step` (0 for the first) uses.

        Warm-up step s of W uses ``learning_rate (s + 1) / W``, so that no step is wasted at rate 0; after it
        progress runs from 0 at step W to 1 at `total_steps`.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        length = max(1, self.total_steps - self.warmup_steps)
        share = DECAYS[self.name](min(1.0, (step - self.warmup_steps) / length))
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * share
