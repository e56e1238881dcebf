"""Optimizers whose only state is one running average of gradients per parameter: Lion and Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import GroupedOptimizer

# Quintic iteration that drives every singular value into about [0.7, 1.2] (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class MomentumOptimizer(GroupedOptimizer):
    """An optimizer with one slot per parameter: ``momentum``, float32 and of its shape, zero before the first step."""

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shape of each slot of a parameter after a step."""
        return {"momentum": tuple(parameter.shape)}

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        momentum: Tensor = state["momentum"]
        return momentum


class Lion(MomentumOptimizer):
    """Chen et al. 2023, "Symbolic discovery of optimization algorithms", program 1, with decoupled weight decay."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        momenta = [self._momentum(parameter) for parameter in parameters]
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-rate)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class Matrices:
    """The whole matrices of Muon's parameters: the parameters themselves, unless ranks have pieces of them."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole matrix."""
        return parameter.shape

    def whole(self, parameter: Tensor, piece: Tensor) -> Tensor:
        """Gathers the whole tensor of which `piece` is this rank's part; it is cut like `parameter`."""
        return piece

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of `whole`."""
        return whole


class Muon(MomentumOptimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay, for matrices (R, C) and stacks of them.

    The update is scaled by ``0.2 sqrt(max(R, C))``, so that its root mean square matches AdamW's and both can use one
    learning rate (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2).
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.matrices = Matrices()
        for group in self.param_groups:
            if any(parameter.ndim < 2 for parameter in group["params"]):
                raise ValueError("Muon is for matrices; give vectors and embeddings to AdamW")

    def _key(self, parameter: Tensor) -> Any:
        return parameter.device, self.matrices.shape(parameter)

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        """Updates matrices of one shape, which it orthogonalises together."""
        momenta = [self._momentum(parameter) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        stacked = torch.stack([self.matrices.whole(*pair) for pair in zip(parameters, ahead, strict=True)])
        updates = orthogonalize(stacked.flatten(0, -3)).view_as(stacked).unbind()
        scale = -group["lr"] * 0.2 * math.sqrt(max(stacked.shape[-2:]))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        moves = [self.matrices.piece(*pair) for pair in zip(parameters, updates, strict=True)]
        torch._foreach_add_(parameters, moves, alpha=scale)


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Replaces the singular values of each of N matrices (R, C) by values near 1 (Newton-Schulz iteration).

    It computes in bfloat16 on a GPU, in which the iteration is known to be stable, and in float32 elsewhere.
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
