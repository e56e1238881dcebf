"""Schedule-free AdamW, which averages its iterates instead of decaying the rate (Defazio et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import GroupedOptimizer


class ScheduleFreeAdamW(GroupedOptimizer):
    """Defazio et al. 2024, "The road less scheduled", algorithm 1.

    There are three points: z takes plain steps, x is the average of all z weighted by their squared rates, and the
    gradient is computed at ``y = (1 - beta1) z + beta1 x``. The parameters are y and the slot ``iterate`` is z; x, the
    point for evaluation, is computed from both (`move_to_average`). ``variance`` is the second moment; ``step`` and
    ``weight_sum``, the sum of squared rates, are numbers.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if betas[0] <= 0:
            raise ValueError("schedule-free AdamW needs a first beta above 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def move_to_average(self) -> None:
        """Overwrites every parameter y by ``x = (y - (1 - beta1) z) / beta1``; the caller puts y back."""
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if self.state[parameter]]
            if moved:
                iterates = [self.state[parameter]["iterate"] for parameter in moved]
                torch._foreach_lerp_(moved, iterates, 1 - 1 / group["betas"][0])

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...] | None]:
        """The shape of each slot of a parameter after a step, None for a number."""
        shape = tuple(parameter.shape)
        return {"step": None, "weight_sum": None, "iterate": shape, "variance": shape}

    def _key(self, parameter: Tensor) -> tuple[Any, ...]:
        state = self._state(parameter)
        return parameter.device, state["step"], state["weight_sum"]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"], state["weight_sum"] = 0, 0.0
            state["iterate"] = parameter.detach().to(torch.float32, copy=True)
            state["variance"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        """Takes one step of parameters that have taken equally many steps at the same rates."""
        states = [self._state(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        step = states[0]["step"] + 1
        rate = group["lr"] * math.sqrt(1 - beta2**step)
        weight_sum = states[0]["weight_sum"] + rate**2
        weight = rate**2 / weight_sum if weight_sum else 0.0
        for state in states:
            state["step"], state["weight_sum"] = step, weight_sum
        iterates = [state["iterate"] for state in states]
        variances = [state["variance"] for state in states]
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
        updates = torch._foreach_sqrt(variances)
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, gradients)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        # Algorithm 1, solved for y, because x is not stored.
        torch._foreach_lerp_(parameters, iterates, weight)
        torch._foreach_add_(parameters, updates, alpha=-rate * (1 - beta1 * (1 - weight)))
        torch._foreach_add_(iterates, updates, alpha=-rate)
