"""Adagrad for tables of which a step reads a few rows: it updates only those, with one number of state per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

# Avoids division by zero; far below the mean square of any gradient.
_EPS = 1e-20


class RowAdagrad(torch.optim.Optimizer):
    """Duchi et al. 2011, equation 1, with one sum per row of a table (R, D) instead of one per number.

    A row with the gradient g moves by ``lr g / sqrt(s)``, where s is the sum of the mean squares of all gradients of
    the row, including this one: the slot ``sum`` (R,). The root mean square of a row's first step is `lr`, and rows
    that occur often take ever smaller steps. Gradients may be sparse. There is no decay, because a step changes only
    the rows that it read.
    """

    dimensions: ClassVar = {"sum": (0,)}
    """The dimensions of the parameter that a slot has, for slots that do not have all of them."""

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shape of each slot of a parameter after a step."""
        return {"sum": tuple(parameter.shape[:1])}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        if closure is not None:
            raise ValueError("RowAdagrad takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, table_RD: Tensor, gradient_RD: Tensor, rate: float) -> None:
        state = self.state[table_RD]
        if not state:
            state["sum"] = torch.zeros(len(table_RD), dtype=torch.float32, device=table_RD.device)
        sums_R = state["sum"]
        if not gradient_RD.is_sparse:
            sums_R += gradient_RD.square().mean(1)
            table_RD -= rate * gradient_RD * (sums_R + _EPS).rsqrt()[:, None]
            return
        gradient_RD = gradient_RD.coalesce()
        rows, values = gradient_RD.indices()[0], gradient_RD.values()
        sums = sums_R[rows] + values.square().mean(1)
        sums_R[rows] = sums
        table_RD.index_add_(0, rows, values * (sums + _EPS).rsqrt()[:, None], alpha=-rate)
