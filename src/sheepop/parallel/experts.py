"""Expert parallelism: each rank has some of the experts, and every token is sent to the ranks of its experts and back.

Router and all other layers run where the token is. The router's choices determine how many rows go to each rank; one
all-to-all before the products and one after them move the rows (Lepikhin et al. 2021, "GShard", section 3.2). No row is
dropped or padded. In generation, where all ranks have every token, each rank has part of the features of every expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sheepop.model import Transformer
from sheepop.model.experts import Experts, MixtureOfExperts, Routing
from sheepop.parallel.collectives import exchanged, summed, whole
from sheepop.parallel.parts import LayerPart, SharingRanks, give_part

_FIRST_MATRICES = ("gate_proj", "up_proj", "gate_bias", "up_bias")


def share_experts(model: Transformer, ranks: SharingRanks) -> None:
    """Cuts the mixtures of `model`, or of a pipeline stage, to this rank's experts, in place."""
    for mixture in model.mixtures.values():
        give_part(mixture.experts, _SomeExperts, ranks, dict.fromkeys(dict(mixture.experts.named_parameters()), 0))


def split_features(experts: Experts, ranks: SharingRanks) -> None:
    """Cuts each of `experts` to this rank's part of its features, for generation, where all ranks have every token."""
    dimensions = {name: 1 for name in _FIRST_MATRICES if getattr(experts, name) is not None}
    give_part(experts, _SomeFeatures, ranks, {**dimensions, "down_proj": 2})


def keep_tokens_apart(mixture: MixtureOfExperts, ranks: SharingRanks) -> None:
    """Lets a mixture read this rank's tokens only, and return the routing of the tokens of all ranks."""
    give_part(mixture, _OfSomeTokens, ranks, {})


class _SomeExperts(LayerPart):
    """Some of the experts, applied to the rows of all ranks that chose them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """As `Experts.forward`, with an all-to-all of the rows before and after."""
        ranks = self.ranks
        leaving_RE = counts_E.view(ranks.size, -1)
        arriving_RE = leaving_RE.clone()
        dist.all_to_all_single(arriving_RE, leaving_RE.contiguous(), group=ranks.group)
        leaving, arriving = leaving_RE.sum(1).tolist(), arriving_RE.sum(1).tolist()
        rows_MD = exchanged(x_MD, _sent, _returned, ranks.group, leaving, arriving)
        # Rows arrive ordered by rank, and the products need them ordered by expert.
        experts = torch.arange(arriving_RE.shape[1], device=x_MD.device).repeat(ranks.size)
        experts_M = experts.repeat_interleave(arriving_RE.flatten(), output_size=sum(arriving))
        order_M = experts_M.argsort(stable=True)
        found_MD = super().forward(rows_MD.index_select(0, order_M), arriving_RE.sum(0))
        places_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=x_MD.device))
        return exchanged(found_MD.index_select(0, places_M), _sent, _returned, ranks.group, arriving, leaving)


class _SomeFeatures(LayerPart):
    """Experts with some of their features; the result is the sum over ranks."""

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        return summed(super().forward(x_MD, counts_E), self.ranks.group)

    def parts(self) -> dict[str, Tensor]:
        found = super().parts()
        if self.ranks.rank and "layer.down_bias" in found:
            found["layer.down_bias"] = torch.zeros_like(found["layer.down_bias"])  # once in the sum
        return found


class _OfSomeTokens(LayerPart):
    """A mixture of experts that reads this rank's tokens and returns the routing of the tokens of all ranks."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        found_BTD, routing = super().forward(x_BTD)
        group, shape = self.ranks.group, (*x_BTD.shape[:2], -1)
        # FSDP mishandles views, so these are copies.
        logits, chosen = (whole(each.view(shape), group).flatten(0, 1).clone() for each in routing)
        return found_BTD, Routing(logits, chosen)


def _sent(rows: Tensor, group: dist.ProcessGroup, leaving: list[int], arriving: list[int]) -> Tensor:
    """Sends `leaving[r]` rows to rank r, in order, and returns the rows that the ranks send here."""
    found = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=group)
    return found


def _returned(rows: Tensor, group: dist.ProcessGroup, leaving: list[int], arriving: list[int]) -> Tensor:
    return _sent(rows, group, arriving, leaving)
