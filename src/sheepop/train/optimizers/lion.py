"""Lion: steps of one size, in the direction of the sign of an average of gradients (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import members_with_gradient
from sheepop.train.optimizers.momentum import MomentumOptimizer


class Lion(MomentumOptimizer):
    """Chen et al. 2023, "Symbolic discovery of optimization algorithms", program 1, with decoupled weight decay."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Lion takes no closure")
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameters in members_with_gradient(group, lambda parameter: parameter.device):
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                momenta = [self._momentum(parameter) for parameter in parameters]
                directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
                torch._foreach_sign_(directions)
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
                torch._foreach_add_(parameters, directions, alpha=-rate)
                torch._foreach_lerp_(momenta, gradients, 1 - beta2)
