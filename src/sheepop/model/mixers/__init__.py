"""What a layer may have instead of attention: one file for each section of the configuration."""

from __future__ import annotations

from torch import nn

from sheepop.model.config import ModelConfig
from sheepop.model.mixers.gated_convolution import GatedConvolution
from sheepop.model.mixers.gated_delta_net import GatedDeltaNet

__all__ = ["GatedConvolution", "GatedDeltaNet", "build_mixer"]


def build_mixer(config: ModelConfig, layer: int) -> nn.Module | None:
    """Returns what `layer` has instead of attention; None is attention.

    A mixer is called with the residual stream (B, T, D), the numbers of the documents (B, T) or None, and a cache or
    None, and returns (B, T, D).
    """
    mixer = config.mixer(layer)
    if mixer == "gated_convolution" and config.gated_convolution is not None:
        return GatedConvolution(config, config.gated_convolution, layer)
    if mixer == "gated_delta_net" and config.gated_delta_net is not None:
        return GatedDeltaNet(config, config.gated_delta_net, layer)
    return None
