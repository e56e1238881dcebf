"""What ranks exchange in the middle of a pass, each with the gradient that belongs to it.

x (B, T, D) has all tokens or this rank's part of them. A sum's gradient is the gradient on every rank; what every rank
reads has the sum of their gradients (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2).
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
_Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


def entered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same on every rank, to compute apart with it; its gradient is the sum of theirs."""
    return _exchanged(x, group, _same, _sum)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks; each of them has its gradient."""
    return _exchanged(x, group, _sum, _same)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens, of which every rank had a part, to compute apart with them; the gradient is the ranks' sum."""
    return _exchanged(x, group, _gather, _scatter)


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the tokens of the sum over ranks."""
    return _exchanged(x, group, _scatter, _gather)


def part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the tokens of what every rank has alike."""
    return _exchanged(x, group, _part, _gather)


def whole(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens, of which every rank had a part, to compute the same with them; the gradient is any rank's."""
    return _exchanged(x, group, _gather, _part)


def alike(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same, to compute alike with what others compute apart with; of gradients that are summed one counts."""
    return _exchanged(x, group, _same, _of_the_first)


def _exchanged(x: Tensor, group: dist.ProcessGroup, there: _Way, back: _Way) -> Tensor:
    found: Tensor = _Exchanged.apply(x, group, there, back)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    """One way forwards and another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: _Way, back: _Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return ctx.back(gradient, ctx.group), None, None, None


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _of_the_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x if dist.get_rank(group) == 0 else torch.zeros_like(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.contiguous().clone()
    dist.all_reduce(found, group=group)
    return found


def _gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    here = x_BTD.transpose(0, 1).contiguous()
    found = here.new_empty(here.shape[0] * dist.get_world_size(group), *here.shape[1:])
    _all_gather(found, here, group=group)
    return _copied(found.transpose(0, 1))


def _scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    everything = x_BTD.transpose(0, 1).contiguous()
    found = everything.new_empty(everything.shape[0] // dist.get_world_size(group), *everything.shape[1:])
    _reduce_scatter(found, everything, group=group)
    return _copied(found.transpose(0, 1))


def _part(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_BTD.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # no view, which FSDP does not hand on well
