"""Muon: momentum whose update is orthogonalised, for the matrices inside the network (Jordan et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import members_with_gradient
from sheepop.train.optimizers.momentum import MomentumOptimizer

# Quintic iteration that drives every singular value into about [0.7, 1.2] (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Replaces the singular values of each of N matrices (R, C) by values near 1 (Newton-Schulz iteration).

    Runs in bfloat16 on a GPU, where the iteration is known to be stable in it, and in float32 elsewhere.
    """
    rows, columns = matrices_NRC.shape[-2:]
    x = matrices_NRC.to(torch.bfloat16 if matrices_NRC.is_cuda else torch.float32)
    if rows > columns:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return (x.mT if rows > columns else x).to(matrices_NRC.dtype)


class Muon(MomentumOptimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay, for matrices (R, C) and stacks of them.

    The update is scaled by ``0.2 sqrt(max(R, C))`` so that its root mean square matches AdamW's and one learning
    rate serves both (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2).
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            if any(parameter.ndim < 2 for parameter in group["params"]):
                raise ValueError("Muon is for matrices; give vectors and embeddings to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; matrices of one shape are orthogonalised together."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for parameters in members_with_gradient(group, lambda parameter: (parameter.device, parameter.shape)):
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                momenta = [self._momentum(parameter) for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
                stacked = torch.stack(list(ahead))
                updates = orthogonalize(stacked.flatten(0, -3)).view_as(stacked)
                scale = -group["lr"] * 0.2 * math.sqrt(max(stacked.shape[-2:]))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=scale)
