"""What a layer may have instead of attention: one file for each section of the configuration.

A mixer is called with the normalised residual stream (B, T, D), the numbers of the documents (B, T) or None, and a
cache or None, and returns (B, T, D).
"""

from sheepop.model.mixers.gated_convolution import GatedConvolution
from sheepop.model.mixers.gated_delta_net import GatedDeltaNet

__all__ = ["GatedConvolution", "GatedDeltaNet"]
