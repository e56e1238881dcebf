"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.fused import uses_triton
from sheepop.model.options import GATED
from sheepop.model.probe import Probe


def relu_squared(x: Tensor) -> Tensor:
    """``max(0, x)^2`` (So et al. 2021, Primer)."""
    return F.relu(x).square()


def clamped_silu(gate: Tensor) -> Tensor:
    """``g sigmoid(1.702 g)`` of the gate g, at most 7 (gpt-oss, 2025)."""
    gate = gate.clamp(max=7.0)
    return gate * (1.702 * gate).sigmoid()


def clamped_plus_one(up: Tensor) -> Tensor:
    """``1 + up``, where up is limited to between -7 and 7 (gpt-oss, 2025)."""
    return up.clamp(-7.0, 7.0) + 1.0


_gelu_tanh: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": relu_squared,
    "gelu": F.gelu,  # x Phi(x) with the exact erf (Hendrycks and Gimpel 2016)
    "gelu_tanh": _gelu_tanh,
    # Activations of the gate (Shazeer 2020).
    "swiglu": F.silu,
    "swiglu_clamped": clamped_silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
}


Change = Callable[[Tensor], Tensor]
_BLOCK = 1024  # numbers that a Triton program computes

# What becomes of the projection that the gate multiplies, if it does not stay as it is.
UP_CHANGES: dict[str, Change] = {"swiglu_clamped": clamped_plus_one}


def apply_gate(gate: Tensor, up: Tensor, change: Change | None = None) -> Tensor:
    """``gate * change(up)``, computed in place in `gate` if no backward pass needs it."""
    up = up if change is None else change(up)
    return gate * up if torch.is_grad_enabled() else gate.mul_(up)


def activated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, change: Change | None) -> Tensor:
    """``activation(gate) * change(up)``; for SwiGLU on a GPU in one kernel, if no gradient is needed."""
    if activation is not F.silu or change is not None or not uses_triton(gate):
        return apply_gate(activation(gate), up, change)
    # Triton takes a second to load, and not every machine has it.
    from sheepop.model.triton_kernels import multiply_by_silu

    (*_, width), y = gate.shape, torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    grid = len(gate), -(-width // _BLOCK)
    multiply_by_silu[grid](gate, up, y, width, gate.stride(0), up.stride(0), BLOCK=_BLOCK)
    return y


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or with a gate ``down(act(gate(x)) * up(x))``, of (B, T, D) to (B, T, D).

    One of `UP_CHANGES` may change ``up(x)`` before the gate multiplies it.
    """

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.ffn_size if width is None else width
        bias = bool(config.feed_forward_bias)
        gated = config.activation in GATED
        self.gate_proj = nn.Linear(config.d_model, width, bias=bias) if gated else None
        self.up_proj = nn.Linear(config.d_model, width, bias=bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=bias)
        self.activation, self.up_change = ACTIVATIONS[config.activation], UP_CHANGES.get(config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.pre_activation, self.hidden = Probe(), Probe()
        if gated:
            self.up = Probe()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Applies the network to each position independently."""
        if self.gate_proj is None:
            hidden_BTF = self.activation(self.pre_activation(self.up_proj(x_BTD)))
        else:
            gate_BTF, up_BTF = self.pre_activation(self.gate_proj(x_BTD)), self.up(self.up_proj(x_BTD))
            hidden_BTF = activated(self.activation, gate_BTF, up_BTF, self.up_change)
        return self.down_proj(self.dropout(self.hidden(hidden_BTF)))
