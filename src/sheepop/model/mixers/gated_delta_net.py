"""Gated DeltaNet: linear attention whose state the gated delta rule updates (Yang et al. 2025)."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from sheepop.model.attention.convolution import ShortConvolution
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.mixers.delta_rule import gated_delta_rule
from sheepop.model.probe import Probe
from sheepop.model.sections import GatedDeltaNetConfig

_EPSILON = 1e-6  # added under the root of the length of queries and keys


class GatedDeltaNet(nn.Module):
    """``W_o (norm(rule(q, k, v, alpha, beta)) * silu(W_g x))``, (B, T, D) to (B, T, D).

    Queries, keys and values are projections of x after a causal convolution and SiLU; queries and keys have length 1.
    ``beta = sigmoid(W_b x)`` is how much of a value is written, ``alpha = exp(-exp(a) softplus(W_a x + b))`` what the
    state keeps. State, gates and rule are in float32.
    """

    def __init__(self, config: ModelConfig, section: GatedDeltaNetConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.section = layer, section
        d_model, heads = config.d_model, section.num_value_heads
        widths = {"q": section.key_width, "k": section.key_width, "v": section.value_width}
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, width, bias=False) for width in widths.values())
        self.gate_proj = nn.Linear(d_model, section.value_width, bias=False)
        self.beta_proj, self.decay_proj = (nn.Linear(d_model, heads, bias=False) for _ in range(2))
        self.convolutions = nn.ModuleDict(
            {name: ShortConvolution(section.width, width, own_tap=True) for name, width in widths.items()}
        )
        self.decay, self.decay_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(section.value_head_dim, eps=config.norm_eps)
        self.o_proj = nn.Linear(section.value_width, d_model, bias=False)
        self.q, self.k, self.v, self.beta, self.log_alpha = Probe(), Probe(), Probe(), Probe(), Probe()
        self.head_outputs = Probe()

    def forward(self, x_BTD: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Runs along each row; a document, by the numbers `document_ids` (B, T), begins without a state."""
        q_BTGK, k_BTGK, v_BTHV = (self._heads(name, x_BTD, document_ids, cache) for name in "qkv")
        exact, device = torch.promote_types(x_BTD.dtype, torch.float32), x_BTD.device.type
        beta_BTH, decay_BTH = self.beta_proj(x_BTD).to(exact), self.decay_proj(x_BTD).to(exact)
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            beta_BTH = self.beta(beta_BTH.sigmoid())
            steps_BTH = functional.softplus(decay_BTH + self.decay_bias.to(exact))
            log_alpha_BTH = self.log_alpha(-self.decay.to(exact).exp() * steps_BTH)
            q_BTGK = self.q(_unit(q_BTGK.to(exact))) * self.section.key_head_dim**-0.5
            k_BTGK, v_BTHV = self.k(_unit(k_BTGK.to(exact))), self.v(v_BTHV.to(exact))
            inputs = (q_BTGK, k_BTGK, v_BTHV, log_alpha_BTH, beta_BTH)
            section = self.section
            start = v_BTHV.new_zeros(section.num_value_heads, section.key_head_dim, section.value_head_dim)
            if cache is None:
                states = start.expand(len(x_BTD), -1, -1, -1)
                out_BTHV, _ = gated_delta_rule(states, *inputs, document_ids, ends=False)
            else:
                out_BTHV = cache.recur(f"state of layer {self.layer}", gated_delta_rule, start, inputs)
        out_BTHV = self.norm(out_BTHV.to(x_BTD.dtype)) * functional.silu(self._split(self.gate_proj(x_BTD), "v"))
        return self.o_proj(self.head_outputs(out_BTHV).flatten(2))

    def _heads(self, name: str, x_BTD: Tensor, document_ids: Tensor | None, cache: Cache | None) -> Tensor:
        where = "" if cache is None else f"{name} of layer {self.layer}"
        convolved = self.convolutions[name](getattr(self, f"{name}_proj")(x_BTD), document_ids, cache, where)
        return self._split(functional.silu(convolved), name)

    def _split(self, x_BTE: Tensor, name: str) -> Tensor:
        width = self.section.value_head_dim if name == "v" else self.section.key_head_dim
        return x_BTE.view(*x_BTE.shape[:-1], -1, width)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
