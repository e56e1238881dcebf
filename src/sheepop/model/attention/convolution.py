"""Short causal convolutions of queries, keys and values, each channel over its own last few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sheepop.model.cache import Cache, shifted


class ShortConvolution(nn.Module):
    """``y_t = x_t + sum_i taps_i x_(t-i)`` for i = 1, ..., W - 1 in each channel (So et al. 2021, Multi-DConv-Head
    Attention).

    It is initialised as the identity. It lets a key encode the tokens before its own, which otherwise takes a layer.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width - 1, channels))

    def forward(
        self, x_BTE: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None, place: str = ""
    ) -> Tensor:
        """Convolves (B, T, E) within each document. `cache` provides the earlier entries of `place`."""
        y_BTE = x_BTE
        earlier = shifted(x_BTE, len(self.taps), document_ids, cache, place)
        for tap_E, earlier_BTE in zip(self.taps, earlier, strict=True):
            y_BTE = torch.addcmul(y_BTE, earlier_BTE, tap_E.to(x_BTE.dtype))
        return y_BTE
