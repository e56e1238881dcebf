"""PyTorch's fused attention, with a mask where the plain triangle does not say all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score, missing
from sheepop.model.attention.sight import Sight


class Fused:
    """`scaled_dot_product` of whole batches."""

    name = "fused"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Soft caps, and scores that can be seen."""
        return missing(self.name, kind, sight)

    def prepare(self, kind: AttentionKind, sight: Sight) -> FusedAttention:
        """Builds a mask where one is needed."""
        # A sink is a column of the mask, so that there has to be one.
        if sight.is_triangle and sight.num_queries > 1 and kind.slopes is None and not kind.sinks:
            return FusedAttention(None, is_causal=True)
        return FusedAttention(sight.added(kind.slopes))


@dataclass(frozen=True)
class FusedAttention:
    """`mask` is what `Sight.added` gives; with `is_causal` it is the plain triangle in place of it."""

    mask: Tensor | None = None
    is_causal: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The mask, where one is needed."""
        return () if self.mask is None else (self.mask,)

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C). A sink is one more key of zeros, whose score is 0, with the sink added to it."""
        score.check("fused")
        if self.is_causal and score.sinks is not None:
            raise ValueError("attention by fused was prepared without sinks; choose_kernel was not told of them")
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
    """PyTorch's function (B, H, T, C), called so that on a GPU one of its fused kernels takes the call.

    FlashAttention serves groups of query heads, but takes no mask and no float32. The memory-efficient kernel takes
    both and no groups, so that it is given every key-value head once for each query head.
    """
    grouped = q_BHTC.shape[1] != k_BKSC.shape[1]
    if grouped and q_BHTC.device.type == "cuda" and (mask is not None or q_BHTC.dtype.itemsize != 2):
        k_BKSC, v_BKSC = (repeat_heads(heads, q_BHTC.shape[1]) for heads in (k_BKSC, v_BKSC))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BKSC,
        v_BKSC,
        attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(q_BHTC.dtype),
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
    )


def repeat_heads(heads_BKSC: Tensor, num_heads: int) -> Tensor:
    """Each key-value head once for every query head that it serves (B, H, S, C)."""
    times = num_heads // heads_BKSC.shape[1]
    return heads_BKSC if times == 1 else heads_BKSC.repeat_interleave(times, dim=1)


def _with_sinks(mask: Tensor | None, sinks_H: Tensor, q_BHTC: Tensor, num_keys: int) -> Tensor:
    """What is added to the scores (B, H, T, S + 1), the sinks in the last column."""
    heads, queries = q_BHTC.shape[1:3]
    if mask is None:
        mask = q_BHTC.new_zeros(1, 1, queries, num_keys)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q_BHTC.dtype).masked_fill(~mask, -torch.inf)
    rows = mask.shape[0]
    sinks = sinks_H.to(mask.dtype)[None, :, None, None].expand(rows, heads, queries, 1)
    return torch.cat((mask.expand(rows, heads, queries, num_keys), sinks), dim=-1)
