"""Normalisation layers, one table row each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sheepop.model.config import ModelConfig

NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    # Ba et al. 2016: (x - mean) / sqrt(variance + eps), scaled by weight and shifted by bias.
    "layernorm": lambda config: nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias),
    # Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps), scaled by weight.
    "rmsnorm": lambda config: nn.RMSNorm(config.d_model, eps=config.norm_eps),
}


def build_norm(config: ModelConfig) -> nn.Module:
    """The normalisation of `config.norm` over the last dimension D."""
    return NORMS[config.norm](config)
