"""PyTorch's fused attention, with a mask unless the plain causal triangle suffices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score, absorbs, missing
from sheepop.model.attention.sight import Sight


class Fused:
    """`scaled_dot_product` on whole batches."""

    name = "fused"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Supports everything except soft caps and visible scores; for latents it would copy them for every head."""
        if kind.latents is not None and absorbs(sight.num_queries, sight.num_keys, kind.latents):
            return "repeats latents for every head"
        return missing(self.name, kind, sight)

    def prepare(self, kind: AttentionKind, sight: Sight) -> FusedAttention:
        """Builds a mask if one is needed."""
        # Sinks are a column of the mask, so they need one.
        if sight.is_triangle and sight.num_queries > 1 and kind.slopes is None and not kind.sinks:
            return FusedAttention(None, is_causal=True)
        return FusedAttention(sight.added(kind.slopes))


@dataclass(frozen=True)
class FusedAttention:
    """`mask` is the result of `Sight.added`; with `is_causal` the mask is the plain causal triangle."""

    mask: Tensor | None = None
    is_causal: bool = False

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C). Sinks are an extra key of zeros, whose score is 0 plus the sink."""
        score.check("fused")
        if self.is_causal and score.sinks is not None:
            raise ValueError("fused attention was prepared without sinks, which choose_kernel did not know of")
        mask = self.mask
        if score.sinks is not None:
            mask = _with_sinks(mask, score.sinks, q_BHTC, k_BKSC.shape[2])
            k_BKSC, v_BKSC = F.pad(k_BKSC, (0, 0, 0, 1)), F.pad(v_BKSC, (0, 0, 0, 1))
        return scaled_dot_product(
            q_BHTC, k_BKSC, v_BKSC, mask=mask, is_causal=self.is_causal, dropout=score.dropout, scale=score.scale
        )


def scaled_dot_product(
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Calls PyTorch's function (B, H, T, C) so that one of its fused kernels runs on a GPU.

    FlashAttention supports grouped query heads, but no mask and no float32. The memory-efficient kernel supports both
    but no groups, so key-value heads are repeated for it, once for each query head.
    """
    grouped = q_BHTC.shape[1] != k_BKSC.shape[1]
    if grouped and q_BHTC.device.type == "cuda" and (mask is not None or q_BHTC.dtype.itemsize != 2):
        k_BKSC, v_BKSC = (repeat_heads(heads, q_BHTC.shape[1]) for heads in (k_BKSC, v_BKSC))
        grouped = False
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q_BHTC.dtype)
    return F.scaled_dot_product_attention(
        q_BHTC, k_BKSC, v_BKSC, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def repeat_heads(heads_BKSC: Tensor, num_heads: int) -> Tensor:
    """Repeats each key-value head for the query heads of its group (B, H, S, C)."""
    times = num_heads // heads_BKSC.shape[1]
    return heads_BKSC if times == 1 else heads_BKSC.repeat_interleave(times, dim=1)


def _with_sinks(mask: Tensor | None, sinks_H: Tensor, q_BHTC: Tensor, num_keys: int) -> Tensor:
    """Returns the mask as numbers to add to the scores (B, H, T, S + 1), with the sinks in the last column."""
    heads, queries = q_BHTC.shape[1:3]
    if mask is None:
        mask = q_BHTC.new_zeros(1, 1, queries, num_keys)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q_BHTC.dtype).masked_fill(~mask, -torch.inf)
    rows = mask.shape[0]
    sinks = sinks_H.to(mask.dtype)[None, :, None, None].expand(rows, heads, queries, 1)
    return torch.cat((mask.expand(rows, heads, queries, num_keys), sinks), dim=-1)
