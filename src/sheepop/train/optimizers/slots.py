"""The state that an optimizer has for a parameter after a step, so that a checkpoint can be checked for all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sheepop.train.optimizers.adafactor import Adafactor
from sheepop.train.optimizers.lion import Lion
from sheepop.train.optimizers.muon import Muon
from sheepop.train.optimizers.schedule_free import ScheduleFreeAdamW

# The shape of each slot by name; None for a slot that is a number and no tensor.
Slots = Mapping[str, tuple[int, ...] | None]


def optimizer_slots(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    """The slots of `parameter`, a member of `group`; raises `ValueError` for an optimizer that is not in the table."""
    for kind, slots in _SLOTS.items():
        if isinstance(optimizer, kind):
            return slots(optimizer, group, parameter)
    raise ValueError(f"the slots of {type(optimizer).__name__} are not known")


def _moments(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    shape = tuple(parameter.shape)
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


def _momentum_buffer(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    return {"momentum_buffer": tuple(parameter.shape)} if group["momentum"] else {}


def _own(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    slots: Slots = optimizer.slots(parameter)
    return slots


_SLOTS: dict[type[torch.optim.Optimizer], Callable[[Any, Mapping[str, Any], Tensor], Slots]] = {
    torch.optim.Adam: _moments,
    torch.optim.AdamW: _moments,
    torch.optim.SGD: _momentum_buffer,
    Muon: _own,
    Lion: _own,
    Adafactor: _own,
    ScheduleFreeAdamW: _own,
}
