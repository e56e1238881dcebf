"""Adafactor: the second moment of a matrix kept as one number a row and one a column (Shazeer and Stern 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sheepop.train.optimizers.groups import members_with_gradient

# Shazeer and Stern 2018, algorithm 4: the smallest scale of a parameter, the largest root mean square of an update,
# and the exponent of the decay of the second moment, 1 - t^(-0.8).
_SMALLEST_SCALE = 1e-3
_LARGEST_UPDATE = 1.0
_DECAY_EXPONENT = -0.8


class Adafactor(torch.optim.Optimizer):
    """Shazeer and Stern 2018, algorithms 4 (matrices) and 5 (all else), with decoupled weight decay.

    Steps are relative: the rate times the root mean square of the parameter itself, where the paper's own rate is
    at most 0.01. The schedule of the run takes the place of the paper's ``min(0.01, 1 / sqrt(t))``, which is no
    part of this class. There is no momentum, so a matrix (R, C) needs R + C numbers of state: the slots ``row``
    (R,) and ``column`` (C,); other parameters have ``variance``, of their shape. `eps` is added to squared gradients.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-2, eps: float = 1e-30, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; those of one shape are updated together."""
        if closure is not None:
            raise ValueError("Adafactor takes no closure")
        for group in self.param_groups:
            for parameters in members_with_gradient(group, self._lockstep):
                self._update(parameters, group["lr"], group["eps"], group["weight_decay"])

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...] | None]:
        """The state of a parameter after a step: the shape of each slot, None for a number."""
        if parameter.ndim == 2:
            return {"step": None, "row": (parameter.shape[0],), "column": (parameter.shape[1],)}
        return {"step": None, "variance": tuple(parameter.shape)}

    def _lockstep(self, parameter: Tensor) -> tuple[Any, ...]:
        return parameter.device, parameter.shape, self._state(parameter)["step"]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            for slot, shape in self.slots(parameter).items():
                state[slot] = 0 if shape is None else torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return state

    def _update(self, parameters: list[Tensor], rate: float, eps: float, weight_decay: float) -> None:
        """One step of N parameters of one shape."""
        states = [self._state(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        decay = 1 - states[0]["step"] ** _DECAY_EXPONENT
        updates = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        if parameters[0].ndim == 2:
            _divide_by_factored_moment(updates, states, decay, eps)
        else:
            variances = _averaged(states, "variance", updates.square() + eps, decay)
            updates.mul_(variances.rsqrt())
        size = math.sqrt(max(1, parameters[0].numel()))
        of_parameters = torch.stack(list(torch._foreach_norm(parameters))) / size
        of_updates = torch.stack(list(torch._foreach_norm(list(updates.unbind())))) / size
        scales_N = rate * of_parameters.clamp(min=_SMALLEST_SCALE) / (of_updates / _LARGEST_UPDATE).clamp(min=1.0)
        updates.mul_(scales_N.view(-1, *[1] * parameters[0].ndim))
        torch._foreach_mul_(parameters, 1 - rate * weight_decay)
        torch._foreach_sub_(parameters, list(updates.unbind()))


def _divide_by_factored_moment(gradients_NRC: Tensor, states: list[dict[str, Any]], decay: float, eps: float) -> None:
    """Divides gradients by the root of ``row column / mean(row)``, which is never written out as a matrix.

    With means in place of the paper's sums the quotient is the same.
    """
    rows, columns = gradients_NRC.shape[-2:]
    of_rows_NR = torch.linalg.vector_norm(gradients_NRC, dim=-1).square() / columns + eps
    of_columns_NC = torch.linalg.vector_norm(gradients_NRC, dim=-2).square() / rows + eps
    row_NR = _averaged(states, "row", of_rows_NR, decay)
    column_NC = _averaged(states, "column", of_columns_NC, decay)
    relative_NR = row_NR / row_NR.mean(dim=-1, keepdim=True)
    gradients_NRC.mul_(relative_NR.rsqrt()[:, :, None]).mul_(column_NC.rsqrt()[:, None, :])


def _averaged(states: list[dict[str, Any]], slot: str, news: Tensor, decay: float) -> Tensor:
    """The running averages of a slot (N, ...) after `news` (N, ...), kept in the states too."""
    averages = torch.stack([state[slot] for state in states]).lerp_(news, 1 - decay)
    torch._foreach_copy_([state[slot] for state in states], list(averages.unbind()))
    return averages
