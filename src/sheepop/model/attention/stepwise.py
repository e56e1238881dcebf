"""Attention in separate steps, scores, softmax and weighted sum, so that probes can see each tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score
from sheepop.model.attention.sight import Sight


class Stepwise:
    """Supports every kind of attention, and holds all T times S scores and weights."""

    name = "stepwise"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Lacks nothing, so it is the last choice."""
        return None

    def prepare(self, kind: AttentionKind, sight: Sight) -> StepwiseAttention:
        """Builds a mask if one is needed."""
        return StepwiseAttention(sight.added(kind.slopes))


@dataclass(frozen=True)
class StepwiseAttention:
    """`mask` is the result of `Sight.added`."""

    mask: Tensor | None = None

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C), and shows scores and weights (B, H, T, S) to the probes of `score`.

        The probed scores are the input of the softmax: scaled, capped, and masked. The softmax is computed in float32.
        """
        batch, heads, queries, width = q_BHTC.shape
        kv_heads, keys = k_BKSC.shape[1:3]
        scale = width**-0.5 if score.scale is None else score.scale
        cap = score.soft_cap
        # The query heads of a key-value head are rows of one product. The scale multiplies the queries, which are
        # fewer than the scores.
        rows_BKRC = (q_BHTC * (scale if cap is None else scale / cap)).reshape(batch, kv_heads, -1, width)
        scores_BHTS = (rows_BKRC @ k_BKSC.transpose(-2, -1)).view(batch, heads, queries, keys)
        if cap is not None:
            # In place, since the backward pass of the product does not need its result.
            scores_BHTS = scores_BHTS.tanh_()
        scores_BHTS = _masked(scores_BHTS, self.mask, 1.0 if cap is None else cap)
        if score.probes is not None:
            scores_BHTS = score.probes[0](scores_BHTS)
        weights_BHTS = _weights(scores_BHTS, score.sinks).to(v_BKSC.dtype)
        if score.probes is not None:
            weights_BHTS = score.probes[1](weights_BHTS)
        rows_BKRS = F.dropout(weights_BHTS, score.dropout).reshape(batch, kv_heads, -1, keys)
        return (rows_BKRS @ v_BKSC).view(batch, heads, queries, -1)


def _masked(scores_BHTS: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """Multiplies the scores by `factor` and applies `mask`."""
    if mask is None:
        return scores_BHTS if factor == 1.0 else scores_BHTS * factor
    if mask.dtype == torch.bool:
        mask = scores_BHTS.new_zeros(()).masked_fill(~mask, -torch.inf)
    mask = mask.to(scores_BHTS.dtype)
    if torch.is_grad_enabled():
        return torch.add(mask, scores_BHTS, alpha=factor)
    return (scores_BHTS if factor == 1.0 else scores_BHTS.mul_(factor)).add_(mask)


def _weights(scores_BHTS: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Returns the softmax over keys, at least in float32; sinks take part in it, and their weight is dropped."""
    exact = torch.promote_types(scores_BHTS.dtype, torch.float32)
    if sinks_H is None:
        return scores_BHTS.softmax(-1, dtype=exact)
    sinks = sinks_H.to(exact)[None, :, None, None].expand(*scores_BHTS.shape[:3], 1)
    return torch.cat((scores_BHTS.to(exact), sinks), dim=-1).softmax(-1)[..., :-1]
