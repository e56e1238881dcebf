"""Weights for evaluation, which may differ from the trained weights.

The loop validates, samples and saves within `EvaluationWeights.applied`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from sheepop.train.config import TrainingConfig
from sheepop.train.optimizers.schedule_free import ScheduleFreeAdamW


class EvaluationWeights:
    """Weights that can replace the trained weights. `differ` is false if they always are the trained weights.

    `are_whole` is false while weights are being exchanged, and after an error during that.
    """

    differ: ClassVar[bool]
    are_whole = True
    _are_applied = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model these weights within the block and its trained ones after it; a nested block does nothing."""
        if self._are_applied:
            yield
            return
        self._exchange(self._put_in)
        self._are_applied = True
        try:
            yield
        finally:
            self._exchange(self._take_out)
            self._are_applied = False

    def _exchange(self, move: Callable[[], None]) -> None:
        self.are_whole = False
        move()
        self.are_whole = True

    def update(self, step: int) -> None:
        """Called after the optimizer has taken step number `step` (0 for the first)."""

    def adopt(self) -> None:
        """Copies the model's present weights, which were read from a checkpoint, into these weights."""

    def _put_in(self) -> None:
        """Gives the model these weights."""

    def _take_out(self) -> None:
        """Gives the model the trained weights again."""


class TrainedWeights(EvaluationWeights):
    """The usual case: the trained weights themselves."""

    differ = False


class AveragedWeights(EvaluationWeights):
    """An exponential moving average of the trained weights over the steps (Polyak and Juditsky 1992).

    After step t (1 for the first) every average e becomes ``d e + (1 - d) w``, where w is its weight and
    ``d = min(decay, (1 + t) / (10 + t))``. The second term is the usual correction of the bias towards the initial
    weights: early averages forget fast. As d depends only on the step, a checkpoint needs only the averages (float32).
    """

    differ = True

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
        self._averages = [weight.detach().to(torch.float32, copy=True) for weight in self._weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the averages towards the weights after step number `step` (0 for the first)."""
        decay = min(self._decay, (2 + step) / (11 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copies the model's present weights into the averages."""
        torch._foreach_copy_(self._averages, self._weights)

    @torch.no_grad()
    def _put_in(self) -> None:
        """Swaps weights and averages.

        It swaps one tensor at a time, so that memory never holds another copy of the model. The weights keep their
        memory addresses, because compiled code may depend on them.
        """
        for weight, average in zip(self._weights, self._averages, strict=True):
            waiting = weight.detach().clone()
            weight.copy_(average)
            average.copy_(waiting)

    _take_out = _put_in


class ScheduleFreeWeights(EvaluationWeights):
    """The average x of schedule-free AdamW; the trained weights are its point y.

    The optimizer updates the average, which follows from the trained weights and the optimizer's state.
    """

    differ = True

    def __init__(self, model: nn.Module, optimizer: ScheduleFreeAdamW) -> None:
        self._weights: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = optimizer
        self._trained: list[Tensor] = []

    def _put_in(self) -> None:
        self._trained = [weight.detach().clone() for weight in self._weights]
        self._optimizer.move_to_average()

    @torch.no_grad()
    def _take_out(self) -> None:
        torch._foreach_copy_(self._weights, self._trained)
        self._trained = []


def build_evaluation_weights(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: TrainingConfig
) -> EvaluationWeights:
    """The weights by `config`: the moving average, the average of schedule-free AdamW, or the trained weights."""
    if config.ema_decay is not None:
        return AveragedWeights(model, config.ema_decay)
    for optimizer in optimizers:
        if isinstance(optimizer, ScheduleFreeAdamW):
            return ScheduleFreeWeights(model, optimizer)
    return TrainedWeights()
