"""A short convolution between two gates (LFM2, Liquid AI 2025)."""

from __future__ import annotations

from torch import Tensor, nn

from sheepop.model.attention.convolution import ShortConvolution
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.probe import Probe
from sheepop.model.sections import GatedConvolutionConfig


class GatedConvolution(nn.Module):
    """``W_o (c * convolution(b * x))`` with ``b, c, x = W_i input``, (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig, section: GatedConvolutionConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.in_proj = nn.Linear(config.d_model, 3 * config.d_model, bias=section.bias)
        self.convolution = ShortConvolution(section.width, config.d_model, own_tap=True, bias=section.bias)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=section.bias)
        self.convolved, self.gated = Probe(), Probe()

    def forward(self, x_BTD: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Convolves each row within its documents, which `document_ids` (B, T) number."""
        b_BTD, c_BTD, x_BTD = self.in_proj(x_BTD).chunk(3, dim=-1)
        # Without a cache no layer number, or each layer would be compiled separately.
        place = "" if cache is None else f"convolution of layer {self.layer}"
        convolved_BTD = self.convolved(self.convolution(b_BTD * x_BTD, document_ids, cache, place))
        return self.o_proj(self.gated(c_BTD * convolved_BTD))
