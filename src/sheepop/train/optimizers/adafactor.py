"""Optimizers that store one number per row: Adafactor for any parameter, and Adagrad for tables.

Adafactor also has one per column of a matrix. Adagrad updates only the few rows of a table that a step reads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import GroupedOptimizer

# Shazeer and Stern 2018, algorithm 4: the smallest scale of a parameter, the largest root mean square of an update,
# and the exponent of the decay of the second moment, 1 - t^(-0.8).
_SMALLEST_SCALE = 1e-3
_LARGEST_UPDATE = 1.0
_DECAY_EXPONENT = -0.8
# Of Adagrad, against division by zero; far below the mean square of any gradient.
_EPS = 1e-20


class Sums:
    """Sums over the entries of Adafactor's parameters. Here they are whole; a subclass adds up the pieces of ranks."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def form(self, parameter: Tensor) -> Hashable:
        """A key; parameters with equal keys can be updated together."""
        return parameter.shape

    def total(self, parameter: Tensor, sums: Tensor, *dimensions: int) -> Tensor:
        """Adds up over all ranks the `sums` of this rank along some `dimensions` of a parameter; may change them."""
        return sums


class Adafactor(GroupedOptimizer):
    """Shazeer and Stern 2018, algorithms 4 (matrices) and 5 (other parameters), with decoupled weight decay.

    Steps are relative: the rate is multiplied by the root mean square of the parameter. The schedule of the run
    replaces the paper's rate ``min(0.01, 1 / sqrt(t))``. There is no momentum, so a matrix (R, C) needs only R + C
    numbers of state: the slots ``row`` (R,) and ``column`` (C,); other parameters have ``variance``, of their shape.
    `eps` is added to squared gradients.
    """

    dimensions: ClassVar = {"row": (0,), "column": (1,)}
    """The dimensions of the parameter that a slot has, for slots that do not have all of them."""

    def __init__(self, params: ParamsT, lr: float = 1e-2, eps: float = 1e-30, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.sums = Sums()

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...] | None]:
        """The shape of each slot of a parameter after a step, None for a number."""
        if len(self.sums.shape(parameter)) == 2:
            return {"step": None, "row": tuple(parameter.shape[:1]), "column": tuple(parameter.shape[-1:])}
        return {"step": None, "variance": tuple(parameter.shape)}

    def _key(self, parameter: Tensor) -> tuple[Any, ...]:
        return parameter.device, self.sums.form(parameter), self._state(parameter)["step"]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            for slot, shape in self.slots(parameter).items():
                state[slot] = 0 if shape is None else torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return state

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        """Takes one step of N parameters of one form."""
        rate, eps = group["lr"], group["eps"]
        first, states = parameters[0], [self._state(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        decay = 1 - states[0]["step"] ** _DECAY_EXPONENT
        updates = torch.stack(gradients)
        if first.ndim == 2:
            self._divide_by_factored_moment(updates, first, states, decay, eps)
        else:
            variances = _averaged(states, "variance", updates.square() + eps, decay)
            updates.mul_(variances.rsqrt())
        norms = [torch.stack(list(torch._foreach_norm(each))) for each in (parameters, list(updates.unbind()))]
        squares_2N = self.sums.total(first, torch.stack(norms).square(), *range(first.ndim))
        of_parameters, of_updates = squares_2N.sqrt() / math.sqrt(max(1, self.sums.shape(first).numel()))
        scales_N = rate * of_parameters.clamp(min=_SMALLEST_SCALE) / (of_updates / _LARGEST_UPDATE).clamp(min=1.0)
        updates.mul_(scales_N.view(-1, *[1] * first.ndim))
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(parameters, list(updates.unbind()))

    def _divide_by_factored_moment(
        self, gradients_NRC: Tensor, parameter: Tensor, states: list[dict[str, Any]], decay: float, eps: float
    ) -> None:
        """Divides gradients by the root of ``row column / mean(row)`` without computing that as a matrix.

        The quotient is the same with means as with the paper's sums. All gradients have the form of `parameter`.
        """
        total, (rows, columns) = self.sums.total, self.sums.shape(parameter)
        squares_NR, squares_NC = (torch.linalg.vector_norm(gradients_NRC, dim=dim).square() for dim in (-1, -2))
        row_NR = _averaged(states, "row", total(parameter, squares_NR, 1) / columns + eps, decay)
        column_NC = _averaged(states, "column", total(parameter, squares_NC, 0) / rows + eps, decay)
        mean_N1 = total(parameter, row_NR.sum(dim=-1, keepdim=True), 0) / rows
        gradients_NRC.mul_((row_NR / mean_N1).rsqrt()[:, :, None]).mul_(column_NC.rsqrt()[:, None, :])


def _averaged(states: list[dict[str, Any]], slot: str, news: Tensor, decay: float) -> Tensor:
    """Updates the running averages of a slot (N, ...) by `news` (N, ...), also in the states, and returns them."""
    averages = torch.stack([state[slot] for state in states]).lerp_(news, 1 - decay)
    torch._foreach_copy_([state[slot] for state in states], list(averages.unbind()))
    return averages


class RowAdagrad(GroupedOptimizer):
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

    def _key(self, parameter: Tensor) -> Any:
        return parameter  # every table on its own

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        """Updates the rows of a table that have a gradient."""
        (table_RD,), (gradient_RD,), rate = parameters, gradients, group["lr"]
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
