"""Short causal convolutions: each channel over its own last few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sheepop.model.cache import Cache, shifted


class ShortConvolution(nn.Module):
    """``y_t = x_t + sum_i taps_i x_(t-i)`` for i = 1, ..., W - 1 in each channel (So et al. 2021, Multi-DConv-Head
    Attention), or with a learned tap of the token itself ``y_t = sum_i taps_i x_(t-i) + bias`` for i = 0, ..., W - 1.

    It is initialised as the identity. It lets a key encode the tokens before its own, which otherwise takes a layer.
    """

    def __init__(self, width: int, channels: int, *, own_tap: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.own_tap, self.reach = own_tap, width - 1
        self.taps = nn.Parameter(torch.empty(width if own_tap else width - 1, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self, x_BTE: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None, place: str = ""
    ) -> Tensor:
        """Convolves (B, T, E) within each document. `cache` provides the earlier entries of `place`."""
        taps_WE = self.taps.to(x_BTE.dtype)
        y_BTE = x_BTE * taps_WE[0] if self.own_tap else x_BTE
        earlier = shifted(x_BTE, self.reach, document_ids, cache, place)
        for tap_E, earlier_BTE in zip(taps_WE[self.own_tap :], earlier, strict=True):
            y_BTE = torch.addcmul(y_BTE, earlier_BTE, tap_E)
        return y_BTE if self.bias is None else y_BTE + self.bias.to(x_BTE.dtype)
