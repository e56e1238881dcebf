"""A mixture of experts: a router chooses a few feed-forward networks for each token, and no token is dropped."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.experts.grouped_product import grouped_product
from sheepop.model.experts.router import Router, Routing, count_choices
from sheepop.model.feedforward import ACTIVATIONS, UP_CHANGES, FeedForward, apply_gate
from sheepop.model.norms import build_norm
from sheepop.model.options import GATED
from sheepop.model.probe import Probe
from sheepop.model.sections import ExpertsConfig


class Experts(nn.Module):
    """E feed-forward networks with stacked weights, each applied to its own rows."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        width, d_model, count = experts.d_ff or config.ffn_size, config.d_model, experts.count
        gated, bias = config.activation in GATED, bool(config.feed_forward_bias)
        self.gate_proj = nn.Parameter(torch.empty(count, width, d_model)) if gated else None
        self.up_proj = nn.Parameter(torch.empty(count, width, d_model))
        self.down_proj = nn.Parameter(torch.empty(count, d_model, width))
        self.gate_bias = nn.Parameter(torch.empty(count, width)) if gated and bias else None
        self.up_bias = nn.Parameter(torch.empty(count, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, d_model)) if bias else None
        self.activation, self.up_change = ACTIVATIONS[config.activation], UP_CHANGES.get(config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.pre_activation, self.hidden = Probe(), Probe()
        if gated:
            self.up = Probe()

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Applies the experts to rows (M, D), the first `counts_E[0]` of them by expert 0 and so on."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        experts_M = None
        if self.up_bias is not None:
            experts = torch.arange(len(counts_E), device=x_MD.device)
            experts_M = experts.repeat_interleave(counts_E, output_size=len(x_MD))

        def apply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            found = grouped_product(rows, weight, ends_E)
            if bias is None or experts_M is None:
                return found
            # Not bias[...]: its gradient on a multithreaded CPU sums an expert's rows in no fixed order.
            return found + bias.index_select(0, experts_M).to(found.dtype)

        up_MF = apply(x_MD, self.up_proj, self.up_bias)
        if self.gate_proj is None:
            hidden_MF = self.activation(self.pre_activation(up_MF))
        else:
            gate_MF = self.pre_activation(apply(x_MD, self.gate_proj, self.gate_bias))
            hidden_MF = apply_gate(self.activation(gate_MF), self.up(up_MF), self.up_change)
        return apply(self.dropout(self.hidden(hidden_MF)), self.down_proj, self.down_bias)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen experts plus the shared experts, (B, T, D) to (B, T, D).

    With `experts.own_norms` router, experts and shared experts normalise the input each by its own norm, and the
    outputs of experts and of shared experts are normalised before they are added.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.router = Router(config, experts)
        self.experts = Experts(config, experts)
        shared_width = experts.shared * (experts.d_ff or config.ffn_size)
        self.shared = FeedForward(config, shared_width) if experts.shared else None
        self.shared_gate = nn.Parameter(torch.empty(1, config.d_model)) if experts.shared_gate else None
        self.router_norm, self.routed_norm, self.routed_output_norm, self.shared_norm, self.shared_output_norm = (
            build_norm(config) if experts.own_norms and (experts.shared or place < 3) else None for place in range(5)
        )
        self.order, self.routed_output = Probe(), Probe()
        if experts.shared:
            self.shared_output = Probe()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        """Returns the output of the experts, and the routing.

        Sorts the tokens by expert, applies all experts with grouped products, and restores the order.
        """
        x_ND = x_BTD.flatten(0, -2)
        logits_NE, weights_Nk, chosen_Nk = self.router(_through(self.router_norm, x_ND))
        x_ND = _through(self.routed_norm, x_ND)
        # Row i of the experts is choice order[i] % k of token order[i] // k.
        order_M = self.order(chosen_Nk.flatten().argsort(stable=True))
        # Not x[...]: its gradient on a multithreaded CPU sums a token's rows in no fixed order.
        rows_MD = x_ND.index_select(0, order_M // self.router.per_token)
        found_MD = self.experts(rows_MD, count_choices(chosen_Nk, logits_NE.shape[1]))
        places_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        out_ND = _combined(found_MD, places_M.view_as(chosen_Nk), weights_Nk.to(found_MD.dtype))
        out_BTD = self.routed_output(_through(self.routed_output_norm, out_ND.view(x_BTD.shape)))
        if self.shared is not None:
            x_BTD = _through(self.shared_norm, x_BTD)
            shared_BTD = _through(self.shared_output_norm, self.shared(x_BTD))
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * F.linear(x_BTD, self.shared_gate.to(x_BTD.dtype)).sigmoid()
            out_BTD = out_BTD + self.shared_output(shared_BTD)
        return out_BTD, Routing(logits_NE, chosen_Nk)


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else cast(Tensor, norm(x))


def _combined(found_MD: Tensor, places_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Returns the weighted sum of the rows at `places_Nk` for each of N tokens (N, D), summed in a fixed order."""
    if found_MD.device.type == "cpu" and found_MD.dtype == torch.float32 and not torch.is_grad_enabled():
        # One pass over the rows; with gradients its backward pass would be slower than that of the code below.
        return F.embedding_bag(places_Nk, found_MD, per_sample_weights=weights_Nk, mode="sum")
    found_NkD = found_MD.index_select(0, places_Nk.flatten()).view(*places_Nk.shape, -1)
    return (found_NkD * weights_Nk[..., None]).sum(1)
