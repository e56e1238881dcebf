"""Collectives with gradients, for the middle of a forward pass.

x (B, T, D) has all tokens or this rank's tokens. The gradient of a sum over ranks is the same on each rank; the
gradient of a tensor that every rank reads is the sum of their gradients (Shoeybi et al. 2019, section 3; Korthikanti et
al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Later versions of torch warn of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def entered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns x, which all ranks have, for ranks that compute different things with it; sums their gradients."""
    return exchanged(x, _same, _sum, group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over ranks; in the backward pass each rank gets the gradient of the sum."""
    return exchanged(x, _sum, _same, group)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers the tokens of all ranks, which compute different things with them; sums and scatters the gradients."""
    return exchanged(x, _gather, _scatter, group)


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's tokens of the sum over ranks; the backward pass gathers their gradients."""
    return exchanged(x, _scatter, _gather, group)


def part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's tokens of x, which all ranks have; the backward pass gathers their gradients."""
    return exchanged(x, _part, _gather, group)


def whole(x: Tensor, group: dist.ProcessGroup, size: int | None = None) -> Tensor:
    """Gathers the tokens of all ranks, which compute the same with them; each keeps its part of the gradient.

    With the `size` of the whole, the last rank may have fewer than the others.
    """
    return exchanged(x, _gather, _part, group, size)


def alike(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns x for a layer that all ranks compute alike; when gradients are summed, only the first rank's counts."""
    return exchanged(x, _same, _of_the_first, group)


def exchanged(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *about: Any) -> Tensor:
    """Returns `there(x, *about)`; the gradient of x is `back(gradient, *about)`."""
    found: Tensor = _Exchanged.apply(x, there, back, *about)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *about: Any) -> Tensor:
        ctx.back, ctx.about = back, about
        return there(x, *about)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0], *ctx.about), None, None, *(None for _ in ctx.about)


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _of_the_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x if dist.get_rank(group) == 0 else torch.zeros_like(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


def _gather(x_BTD: Tensor, group: dist.ProcessGroup, size: int | None = None) -> Tensor:
    here, count = x_BTD.transpose(0, 1).contiguous(), dist.get_world_size(group)
    each = len(here) if size is None else -(-size // count)
    if len(here) < each:  # all ranks send as much, and what the last one adds is cut off at the end
        here = torch.cat([here, here.new_empty(each - len(here), *here.shape[1:])])
    found = here.new_empty(each * count, *here.shape[1:])
    _all_gather(found, here, group=group)
    return _copied(found[:size].transpose(0, 1))


def _scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    everything = x_BTD.transpose(0, 1).contiguous()
    found = everything.new_empty(everything.shape[0] // dist.get_world_size(group), *everything.shape[1:])
    _reduce_scatter(found, everything, group=group)
    return _copied(found.transpose(0, 1))


def _part(x_BTD: Tensor, group: dist.ProcessGroup, *_: int) -> Tensor:
    return x_BTD.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # FSDP mishandles views
