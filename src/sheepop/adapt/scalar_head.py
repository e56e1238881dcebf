"""Heads that predict one number for each position: the reward of an answer, or the value of a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model import Transformer

REWARD_HEAD, VALUE_HEAD = "reward_head", "value_head"
VALUE_MODEL = "value_model"
"""The module name of a separate value network within the policy."""


def is_of_values(name: str) -> bool:
    """Whether a weight of a policy belongs to its value head or value model."""
    return name.partition(".")[0] in (VALUE_HEAD, VALUE_MODEL)


class ScalarHead(nn.Linear):
    """Maps hidden states (..., D) to numbers (...), at least in float32. Its weights are initialised with 0."""

    def __init__(self, d_model: int, *, bias: bool, device: torch.device | None = None) -> None:
        super().__init__(d_model, 1, bias=bias, device=device)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns one number for each hidden state."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(exact)
            return F.linear(hidden.to(exact), self.weight.to(exact), bias).squeeze(-1)


def add_scalar_head(model: Transformer, name: str) -> ScalarHead:
    """Adds a scalar head to the network, in place, as the module `name`.

    Only a value head has a bias: rewards are compared with each other, so a bias would have no effect.
    """
    head = ScalarHead(model.config.d_model, bias=name == VALUE_HEAD, device=model.device)
    model.add_module(name, head)
    return head


def scalar_head(model: nn.Module, name: str) -> ScalarHead:
    """Returns the head called `name`; raises `LookupError` if the network has none."""
    found = getattr(model, name, None)
    if not isinstance(found, ScalarHead):
        raise LookupError(f"the network has no {name}")
    return found
