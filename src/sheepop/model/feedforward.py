"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # x Phi(x) with the exact erf (Hendrycks and Gimpel 2016)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,  # the gate's activation (Shazeer 2020)
}


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or ``down(silu(gate(x)) * up(x))`` for swiglu; (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate_proj = nn.Linear(config.d_model, config.ffn_size, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(config.d_model, config.ffn_size, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn_size, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Applies the network to every position on its own."""
        up_BTF = self.up_proj(x_BTD)
        if self.gate_proj is None:
            hidden_BTF = self.activation(up_BTF)
        else:
            hidden_BTF = self.activation(self.gate_proj(x_BTD)) * up_BTF
        return self.down_proj(self.dropout(hidden_BTF))
