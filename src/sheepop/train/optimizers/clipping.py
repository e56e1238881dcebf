"""Clipping of gradients by their global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before.

    With `max_norm` None the norm is only measured (Pascanu et al. 2013, algorithm 1, over all parameters).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    # On a CPU the norm is known at once, and a factor of 1 would only cost time.
    if max_norm is not None and not (norm.device.type == "cpu" and norm <= max_norm):
        factor = torch.clamp(max_norm / norm, max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def unscale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Divides all gradients by the scale of the loss that they were computed from."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / scale)
