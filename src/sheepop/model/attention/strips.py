"""Causal sliding-window attention in strips: work and memory grow with T times the window, not with T^2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.attention.fused import Fused, scaled_dot_product
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score, missing
from sheepop.model.attention.products import Products
from sheepop.model.attention.sight import Sight


class Strips:
    """Splits queries into strips of `window` positions, which see keys of their own strip and of the one before."""

    name = "strips"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Supports only windows of at most half a row."""
        if absent := missing(self.name, kind, sight):
            return absent
        pays = sight.reach is not None and 2 * sight.reach <= sight.num_keys
        return None if pays else "saves nothing without a window of at most half a row"

    def prepare(self, kind: AttentionKind, sight: Sight) -> StripsAttention:
        """Prepares a causal triangle for the first strip, which sees only itself, and one mask for all others."""
        window = sight.reach
        assert window is not None
        first = replace(sight, num_queries=window, num_keys=window)
        triangle = Fused() if Products().lacks(kind, first) else Products()
        others = replace(sight, num_queries=window, num_keys=2 * window)
        return StripsAttention(window, triangle.prepare(kind, first), others.allowed()[0, 0])


@dataclass(frozen=True)
class StripsAttention:
    """`first` attends in the first strip; `allowed` (window, 2 window) is the mask of every other strip."""

    window: int
    first: Attending
    allowed: Tensor

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Computes attention of whole rows (B, H, T, C), with all strips except the first in one call."""
        score.check("strips")
        heads, length = q_BHTC.shape[1:3]
        window, count = self.window, -(-length // self.window)
        q, k, v = (part[:, :, :window] for part in (q_BHTC, k_BKTC, v_BKTC))
        first = self.first.attend(q, k, v, score)
        q, k, v = (_cut(part, count, window) for part in (q_BHTC, k_BKTC, v_BKTC))
        k, v = (torch.cat((part[:, :-1], part[:, 1:]), dim=3) for part in (k, v))
        q, k, v = (part.flatten(0, 1) for part in (q[:, 1:], k, v))
        rest = scaled_dot_product(q, k, v, mask=self.allowed, dropout=score.dropout, scale=score.scale)
        rest = rest.view(-1, count - 1, heads, window, v.shape[-1]).transpose(1, 2).flatten(2, 3)
        return torch.cat((first, rest), dim=2)[:, :, :length]


def _cut(heads_BHTC: Tensor, count: int, window: int) -> Tensor:
    """Cuts heads into strips (B, strips, H, window, C). The padding is at the end, where no query sees it."""
    batch, heads, length, width = heads_BHTC.shape
    if missing_places := count * window - length:
        heads_BHTC = F.pad(heads_BHTC, (0, 0, 0, missing_places))
    return heads_BHTC.reshape(batch, heads, count, window, width).transpose(1, 2)
