"""Which experts a token goes to: the router, what it chose, and the losses that keep it in order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ExpertsConfig, ModelConfig
from sheepop.model.probe import Probe


class Routing(NamedTuple):
    """What a router did with N tokens: its logits (N, E), with their gradient, and the experts it chose (N, k)."""

    logits: Tensor
    chosen: Tensor

    def of(self, places: Tensor | slice) -> Routing:
        """The routing of some of the tokens, by their flat indices."""
        return self if isinstance(places, slice) else Routing(self.logits[places], self.chosen[places])

    @property
    def counts(self) -> Tensor:
        """The tokens of each expert (E,), int64."""
        return count_choices(self.chosen, self.logits.shape[1])

    def load_balancing_loss(self, counts_E: Tensor | None = None) -> Tensor:
        """``E sum_e f_e P_e``: f_e the choices per token that fell on e, P_e its mean probability (Fedus et al. 2021).

        Equal loads give the number of experts per token, which is the least when f and P agree. No token gives 0. Where
        these are a part of the tokens whose loads should be even, `counts_E` are those of all of them.
        """
        tokens, experts = self.logits.shape
        if counts_E is None:
            fractions_E = self.counts.to(self.logits.dtype) / max(1, tokens)
        else:
            fractions_E = counts_E.to(self.logits.dtype) * (self.chosen.shape[1] / counts_E.sum().clamp(min=1))
        return experts / max(1, tokens) * (fractions_E * self.logits.softmax(-1).sum(0)).sum()

    def z_loss(self) -> Tensor:
        """The mean of ``logsumexp(logits)^2`` (Zoph et al. 2022, equation 5); no token gives 0."""
        return self.logits.logsumexp(-1).square().sum() / max(1, self.logits.shape[0])


def count_choices(chosen_Nk: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen (E,), int64; unlike bincount this does not make the host wait for a GPU."""
    chosen_M = chosen_Nk.flatten()
    return chosen_M.new_zeros(num_experts).scatter_add_(0, chosen_M, torch.ones_like(chosen_M))


class Router(nn.Module):
    """Scores every expert for every token in float32, and chooses the best `per_token` of them.

    `balance` (E,) is added to the scores for the choice only, not to the weights of the chosen; training moves it
    towards even loads without a gradient (Wang et al. 2024, auxiliary-loss-free load balancing).
    """

    balance: Tensor

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, config.d_model))
        self.register_buffer("balance", torch.zeros(experts.count))
        self.per_token, self.normalize, self.scores = experts.per_token, experts.normalize, experts.scores
        self.logits, self.chosen, self.weights = Probe(), Probe(), Probe()

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, E), the weights of the chosen experts (N, k), and which they are (N, k)."""
        exact, device = torch.promote_types(x_ND.dtype, torch.float32), x_ND.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            logits_NE = self.logits(F.linear(x_ND.to(exact), self.weight.to(exact)))
        scores_NE = logits_NE.softmax(-1) if self.scores == "softmax" else logits_NE.sigmoid()
        chosen_Nk = self.chosen((scores_NE.detach() + self.balance).topk(self.per_token, dim=-1).indices)
        weights_Nk = scores_NE.gather(1, chosen_Nk)
        if self.normalize:
            # The scores of all that were chosen may underflow to zero.
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
        return logits_NE, self.weights(weights_Nk), chosen_Nk
