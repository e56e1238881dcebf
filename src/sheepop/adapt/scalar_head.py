"""A number for every position of a network: what an answer is worth, or what is still to be expected."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model import Transformer

REWARD_HEAD, VALUE_HEAD = "reward_head", "value_head"
VALUE_MODEL = "value_model"
"""The name that a network of its own for values has in the policy."""


def is_of_values(name: str) -> bool:
    """Whether a weight of a policy belongs to what judges its states, and not to what writes."""
    return name.partition(".")[0] in (VALUE_HEAD, VALUE_MODEL)


class ScalarHead(nn.Linear):
    """Hidden states (..., D) to numbers (...), in float32 at least. It begins at 0, so all begin alike."""

    def __init__(self, d_model: int, *, bias: bool, device: torch.device | None = None) -> None:
        super().__init__(d_model, 1, bias=bias, device=device)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """One number for every hidden state."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(exact)
            return F.linear(hidden.to(exact), self.weight.to(exact), bias).squeeze(-1)


def add_scalar_head(model: Transformer, name: str) -> ScalarHead:
    """Puts a head beside the output projection of a network, in place, as the module `name`.

    Rewards are compared with each other, so a bias would say nothing; values have one.
    """
    head = ScalarHead(model.config.d_model, bias=name == VALUE_HEAD, device=model.device)
    model.add_module(name, head)
    return head


def scalar_head(model: nn.Module, name: str) -> ScalarHead:
    """The head of that name; raises `LookupError` for a network without it."""
    found = getattr(model, name, None)
    if not isinstance(found, ScalarHead):
        raise LookupError(f"the network has no {name}")
    return found
