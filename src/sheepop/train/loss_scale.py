"""The scale of the loss under float16, whose smallest numbers are too large for most gradients.

The loss is multiplied by a power of two before the backward pass and the gradients are divided by it after, so that
small gradients are not lost (Micikevicius et al. 2018, section 3.2). The scale follows from what happened before: it
is part of a run's state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sheepop.core.errors import TrainingError

INITIAL = 2.0**16
FLOOR = 1.0
_GROWTH_STEPS = 2000  # without overflow, before a larger scale is tried


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, how many steps in a row it served, and how many steps were skipped so far."""

    scale: float = INITIAL
    good_steps: int = 0
    skipped_steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """Twice the scale after 2,000 steps with finite gradients in a row, half of it after an overflow.

        Raises `TrainingError` when half would be below 1: then it is not the scale that overflows.
        """
        if not finite:
            if self.scale / 2 < FLOOR:
                raise TrainingError(
                    f"Gradients overflow float16 even with loss scale {self.scale:g}, after {self.skipped_steps} "
                    "skipped steps. Lower training.learning_rate, or use training.precision = bf16 or fp32."
                )
            return LossScale(self.scale / 2, 0, self.skipped_steps + 1)
        if self.good_steps + 1 == _GROWTH_STEPS:
            return replace(self, scale=self.scale * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


def initial_loss_scale(precision: str) -> LossScale | None:
    """The scale that a run in `precision` begins with; only float16 needs one."""
    return LossScale() if precision == "fp16" else None
