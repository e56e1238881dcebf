"""Vectors of each token for each layer, which gate a third branch of the layer (Gemma 3n and 4, 2025).

Shapes, besides those of the network: P the width of these vectors.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.feedforward import ACTIVATIONS
from sheepop.model.norms import build_norm
from sheepop.model.probe import Probe
from sheepop.model.sections import LayerInputsConfig


class LayerInputs(nn.Module):
    """``(norm(W x / sqrt(D)) + sqrt(P) e) / sqrt(2)`` of the vector x (D,) and the embedding e (L P,) of a token."""

    def __init__(self, config: ModelConfig, section: LayerInputsConfig) -> None:
        super().__init__()
        self.width = section.width
        columns = config.num_layers * section.width
        self.embedding = nn.Embedding(config.vocabulary, columns)
        self.projection = nn.Linear(config.d_model, columns, bias=False)
        self.norm = build_norm(config, section.width)

    def forward(self, input_ids: Tensor, x_BTD: Tensor) -> Tensor:
        """Returns the vectors (B, T, L, P) of token ids (B, T) with the stream (B, T, D) before the first block."""
        projected = (self.projection(x_BTD) * x_BTD.shape[-1] ** -0.5).unflatten(-1, (-1, self.width))
        looked_up = self.embedding(input_ids).view(projected.shape) * math.sqrt(self.width)
        return (self.norm(projected).to(projected.dtype) + looked_up.to(projected.dtype)) * 0.5**0.5


class LayerInputBranch(nn.Module):
    """``norm(W_o (act(W_g x) * p))`` of the stream x (B, T, D) and the vectors p (B, T, P) of this layer."""

    def __init__(self, config: ModelConfig, section: LayerInputsConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, section.width, bias=False)
        self.o_proj = nn.Linear(section.width, config.d_model, bias=False)
        self.norm = build_norm(config)
        self.activation = ACTIVATIONS[config.activation]
        self.pre_activation, self.hidden = Probe(), Probe()

    def forward(self, x_BTD: Tensor, vectors_BTP: Tensor) -> Tensor:
        """Applies the branch to each position independently."""
        gate_BTP = self.activation(self.pre_activation(self.gate_proj(x_BTD)))
        return self.norm(self.o_proj(self.hidden(gate_BTP * vectors_BTP)))
