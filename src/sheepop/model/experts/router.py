"""The router, which chooses the experts of each token, its result, and the losses that regularise it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.probe import Probe
from sheepop.model.sections import ExpertsConfig


class Routing(NamedTuple):
    """A router's result for N tokens: its logits (N, E), with gradient, and the chosen experts (N, k)."""

    logits: Tensor
    chosen: Tensor

    def of(self, places: Tensor | slice) -> Routing:
        """Returns the routing of some tokens, selected by their flat indices."""
        return self if isinstance(places, slice) else Routing(self.logits[places], self.chosen[places])

    @property
    def counts(self) -> Tensor:
        """The number of tokens of each expert (E,), int64."""
        return count_choices(self.chosen, self.logits.shape[1])

    def load_balancing_loss(self, counts_E: Tensor | None = None) -> Tensor:
        """Returns ``E sum_e f_e P_e``: f_e is the choices of e per token, P_e its mean probability (Fedus et al. 2021).

        If f and P agree, the minimum is the number of experts per token, at equal loads. Without tokens it is 0. If
        these tokens are only some of those whose loads should be even, `counts_E` are the counts of all of them.
        """
        tokens, experts = self.logits.shape
        if counts_E is None:
            fractions_E = self.counts.to(self.logits.dtype) / max(1, tokens)
        else:
            fractions_E = counts_E.to(self.logits.dtype) * (self.chosen.shape[1] / counts_E.sum().clamp(min=1))
        return experts / max(1, tokens) * (fractions_E * self.logits.softmax(-1).sum(0)).sum()

    def z_loss(self) -> Tensor:
        """Returns the mean of ``logsumexp(logits)^2`` (Zoph et al. 2022, equation 5), 0 without tokens."""
        return self.logits.logsumexp(-1).square().sum() / max(1, self.logits.shape[0])


def count_choices(chosen_Nk: Tensor, num_experts: int) -> Tensor:
    """Counts how often each expert was chosen (E,), int64; unlike bincount this does not synchronise with a GPU."""
    chosen_M = chosen_Nk.flatten()
    return chosen_M.new_zeros(num_experts).scatter_add_(0, chosen_M, torch.ones_like(chosen_M))


class Router(nn.Module):
    """Scores all experts for each token in float32, and chooses the best `per_token` of them.

    `balance` (E,) is added to the scores for the choice only, not for the weights of the chosen experts; training moves
    it towards even loads without a gradient (Wang et al. 2024, auxiliary-loss-free load balancing).
    """

    balance: Tensor

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, config.d_model))
        self.bias = nn.Parameter(torch.zeros(experts.count)) if experts.router_bias else None
        self.expert_scale = nn.Parameter(torch.ones(experts.count)) if experts.expert_scales else None
        self.logit_scale = experts.router_scale
        self.register_buffer("balance", torch.zeros(experts.count))
        self.per_token, self.normalize, self.scores = experts.per_token, experts.normalize, experts.scores
        self.groups, self.groups_per_token, self.group_top = experts.groups, experts.groups_per_token, experts.group_top
        self.scale = experts.scale
        self.logits, self.chosen, self.weights = Probe(), Probe(), Probe()

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits (N, E), the weights of the chosen experts (N, k), and their indices (N, k)."""
        exact, device = torch.promote_types(x_ND.dtype, torch.float32), x_ND.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            logits_NE = F.linear(x_ND.to(exact), self.weight.to(exact)) * self.logit_scale
            logits_NE = self.logits(logits_NE if self.bias is None else logits_NE + self.bias.to(exact))
        scores_NE = logits_NE.softmax(-1) if self.scores == "softmax" else logits_NE.sigmoid()
        eligible_NE = self._in_best_groups(scores_NE.detach() + self.balance)
        chosen_Nk = self.chosen(eligible_NE.topk(self.per_token, dim=-1).indices)
        weights_Nk = scores_NE.gather(1, chosen_Nk)
        if self.normalize:
            # The scores of all chosen experts may underflow to zero.
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
        if self.scale != 1.0:
            weights_Nk = weights_Nk * self.scale
        if self.expert_scale is not None:
            weights_Nk = weights_Nk * self.expert_scale.to(weights_Nk.dtype)[chosen_Nk]
        return logits_NE, self.weights(weights_Nk), chosen_Nk

    def _in_best_groups(self, scores_NE: Tensor) -> Tensor:
        """Returns the scores of the experts in the best groups of each token, and -inf for the others.

        The groups are ranked by their best score (DeepSeek-V2, 2024, section 2.2.2) or by the sum of several.
        """
        if self.groups_per_token == self.groups:
            return scores_NE
        scores_NGe = torch.unflatten(scores_NE, 1, (self.groups, -1))
        best_Ng = scores_NGe.topk(self.group_top, dim=-1).values.sum(-1).topk(self.groups_per_token, dim=-1).indices
        left_out_NG = torch.ones_like(scores_NGe[..., 0], dtype=torch.bool).scatter_(1, best_Ng, False)
        return scores_NGe.masked_fill(left_out_NG[..., None], -torch.inf).flatten(1)
