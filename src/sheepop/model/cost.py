"""What a network costs, as a function of its configuration."""

from __future__ import annotations

import torch

from sheepop.model.architectures import blank_model
from sheepop.model.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Trained numbers, tied ones once; needs a known vocabulary."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in blank_model(config).parameters())


def matrix_parameters(config: ModelConfig) -> int:
    """Weights that multiply every token: projections, feed-forward and output head; no look-up, no vectors."""
    q_width, kv_width = config.num_heads * config.head_size, config.kv_heads * config.head_size
    attention = config.d_model * (2 * q_width + 2 * kv_width)
    feed_forward = (3 if config.activation == "swiglu" else 2) * config.d_model * config.ffn_size
    return config.num_layers * (attention + feed_forward) + config.d_model * config.vocabulary


def forward_flops_per_token(config: ModelConfig, context: float) -> float:
    """Floating-point operations of one token's forward pass when queries see `context` keys in the mean.

    Two per weight, plus two products of length head_dim per head and key. For causal training on sequences of
    T tokens the mean context is (T + 1) / 2.
    """
    attention = 4 * config.num_layers * config.num_heads * config.head_size * context
    return 2 * matrix_parameters(config) + attention


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward (twice the forward) of one token in causal sequences of `seq_len`, nothing recomputed."""
    return 3 * forward_flops_per_token(config, (seq_len + 1) / 2)
