"""Expert parallelism: ranks have some of the experts each, and send every token to where its experts are and back.

The router and all else is computed where a token is. What the router chose says how many rows go to each rank; two
exchanges of all with all, there and back, surround the products (Lepikhin et al. 2021, "GShard", section 3.2), and no
row is dropped or padded. To write, where all ranks have every token, each has a part of the features of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.experts import Experts, MixtureOfExperts, Routing
from sheepop.parallel.collectives import summed, whole
from sheepop.parallel.parts import LayerPart, SharingRanks, give_part

_FIRST_MATRICES = ("gate_proj", "up_proj", "gate_bias", "up_bias")


def check_experts(config: ModelConfig, count: int) -> None:
    """Raises `ConfigError` for a network whose experts cannot be shared by `count` ranks."""
    if count == 1:
        return
    if config.experts is None:
        raise ConfigError(f"parallel.expert = {count} shares experts, and the network has none (model.experts).")
    if config.experts.count % count:
        raise ConfigError(
            f"parallel.expert = {count} does not divide model.experts.count = {config.experts.count}. Use a divisor."
        )


def share_experts(model: Transformer, ranks: SharingRanks) -> None:
    """Gives the mixtures of `model`, or of a stage of one, this rank's experts, in place."""
    for mixture in model.mixtures.values():
        give_part(mixture.experts, _SomeExperts, ranks, dict.fromkeys(dict(mixture.experts.named_parameters()), 0))


def split_features(experts: Experts, ranks: SharingRanks) -> None:
    """Gives `experts` this rank's part of the features of each, to be computed for tokens that all ranks have."""
    dimensions = {name: 1 for name in _FIRST_MATRICES if getattr(experts, name) is not None}
    give_part(experts, _SomeFeatures, ranks, {**dimensions, "down_proj": 2})


def keep_tokens_apart(mixture: MixtureOfExperts, ranks: SharingRanks) -> None:
    """Lets a mixture read this rank's part of the tokens, and tell how all of them were routed."""
    give_part(mixture, _OfSomeTokens, ranks, {})


class _SomeExperts(LayerPart):
    """Experts of which this rank has some, applied to the rows of all ranks that are theirs."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """As `Experts.forward`; rows travel to the ranks of their experts and back."""
        ranks = self.ranks
        leaving_RE = counts_E.view(ranks.size, -1)
        arriving_RE = leaving_RE.clone()
        dist.all_to_all_single(arriving_RE, leaving_RE.contiguous(), group=ranks.group)
        leaving, arriving = leaving_RE.sum(1).tolist(), arriving_RE.sum(1).tolist()
        rows_MD = _travelled(x_MD, ranks.group, leaving, arriving)
        # They arrive by rank, and are computed by expert.
        experts = torch.arange(arriving_RE.shape[1], device=x_MD.device).repeat(ranks.size)
        experts_M = experts.repeat_interleave(arriving_RE.flatten(), output_size=sum(arriving))
        order_M = experts_M.argsort(stable=True)
        found_MD = super().forward(rows_MD.index_select(0, order_M), arriving_RE.sum(0))
        places_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=x_MD.device))
        return _travelled(found_MD.index_select(0, places_M), ranks.group, arriving, leaving)


class _SomeFeatures(LayerPart):
    """Experts with some of their features: the sum over ranks is the result."""

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        return summed(super().forward(x_MD, counts_E), self.ranks.group)

    def parts(self) -> dict[str, Tensor]:
        found = super().parts()
        if self.ranks.rank and "layer.down_bias" in found:
            found["layer.down_bias"] = torch.zeros_like(found["layer.down_bias"])  # once in the sum
        return found


class _OfSomeTokens(LayerPart):
    """A mixture of experts that reads this rank's tokens and tells of those of all ranks."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        found_BTD, routing = super().forward(x_BTD)
        group, shape = self.ranks.group, (*x_BTD.shape[:2], -1)
        # Copies: FSDP does not hand on views well.
        logits, chosen = (whole(each.view(shape), group).flatten(0, 1).clone() for each in routing)
        return found_BTD, Routing(logits, chosen)


def _travelled(rows: Tensor, group: dist.ProcessGroup, leaving: list[int], arriving: list[int]) -> Tensor:
    found: Tensor = _Travelled.apply(rows, group, leaving, arriving)  # type: ignore[no-untyped-call]
    return found


class _Travelled(torch.autograd.Function):
    """Rows in the order of ranks, so many for each, for those that they have for this one; gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, leaving: list[int], arriving: list[int]) -> Tensor:
        ctx.group, ctx.leaving, ctx.arriving = group, leaving, arriving
        return _exchange(rows, group, leaving, arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.group, ctx.arriving, ctx.leaving), None, None, None


def _exchange(rows: Tensor, group: dist.ProcessGroup, leaving: list[int], arriving: list[int]) -> Tensor:
    found = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=group)
    return found
