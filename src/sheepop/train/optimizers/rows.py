"""Updates of a parameter whose gradient exists for some of its rows at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sheepop.train.optimizers.build import optimizer_slots

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose update of a number depends on the gradient of that number alone."""


def group_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    """The group of parameters of an optimizer that `parameter` belongs to."""
    groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    return next(groups, None)


@torch.no_grad()
def update_rows(optimizer: torch.optim.Optimizer, parameter: Tensor, blocks: Iterable[tuple[slice, Tensor]]) -> None:
    """Updates `parameter` as a step of `optimizer`, one of `ELEMENTWISE`, would with the whole gradient.

    `blocks` are slices of its rows with their gradients. A row is updated before the next block is taken.
    """
    group = group_of(optimizer, parameter)
    assert group is not None
    settings = {name: value for name, value in group.items() if name != "params"}
    state = optimizer.state[parameter]
    for name, shape in optimizer_slots(optimizer, group, parameter).items():
        if name not in state:
            state[name] = parameter.new_zeros(shape or ())
    kind: Any = type(optimizer)
    counts = {name: value.clone() for name, value in state.items() if value.shape != parameter.shape}
    for rows, gradient in blocks:
        part = parameter.detach()[rows]
        part.grad = gradient
        mover = kind([{**settings, "params": [part]}])
        of_rows = {name: value[rows] for name, value in state.items() if name not in counts}
        mover.state[part] = {**of_rows, **{name: value.clone() for name, value in counts.items()}}
        mover.step()
        state.update({name: mover.state[part][name] for name in counts})
