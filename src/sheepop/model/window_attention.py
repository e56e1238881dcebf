"""Causal attention within a sliding window, in strips: work and memory grow with T times the window, not with T^2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.causal_attention import attend_causally
from sheepop.model.distances import allowed_by_distance


@dataclass(frozen=True)
class Strips:
    """Queries in strips of `window` places, which see keys of their own strip and of the one before it.

    `allowed` (window, 2 window) says which; the first strip sees itself only, as a triangle.
    """

    window: int
    allowed: Tensor

    @classmethod
    def of(cls, length: int, window: int, device: torch.device | str = "cpu") -> Strips | None:
        """The strips of windows of this many keys, the query's own included; None where they save nothing."""
        if 2 * window > length:
            return None
        return cls(window, allowed_by_distance(window, 2 * window, window=window, device=device))


def attend_in_strips(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, strips: Strips, dropout: float, scale: float | None = None
) -> Tensor:
    """Attention of whole rows (B, H, T, C), all strips but the first in one call."""
    heads, length = q_BHTC.shape[1:3]
    window, count = strips.window, -(-length // strips.window)
    q, k, v = (part[:, :, :window] for part in (q_BHTC, k_BKTC, v_BKTC))
    first = attend_causally(q, k, v, dropout, scale)
    q, k, v = (_cut(part, count, window) for part in (q_BHTC, k_BKTC, v_BKTC))
    k, v = (torch.cat((part[:, :-1], part[:, 1:]), dim=3) for part in (k, v))
    rest = F.scaled_dot_product_attention(
        q[:, 1:].flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        attn_mask=strips.allowed,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=heads != k_BKTC.shape[1],
    )
    rest = rest.view(-1, count - 1, heads, window, v.shape[-1]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest), dim=2)[:, :, :length]


def _cut(heads_BHTC: Tensor, count: int, window: int) -> Tensor:
    """(B, strips, H, window, C). Padding stands behind every place, where no query sees it."""
    batch, heads, length, width = heads_BHTC.shape
    if missing := count * window - length:
        heads_BHTC = F.pad(heads_BHTC, (0, 0, 0, missing))
    return heads_BHTC.reshape(batch, heads, count, window, width).transpose(1, 2)
