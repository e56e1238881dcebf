"""Attention computed as it is written: scores, their softmax, the weighted sum, each a tensor that can be seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.distances import allowed_by_distance
from sheepop.model.mask import AttentionMask
from sheepop.model.probe import Probe


def attend_stepwise(
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    probes: tuple[Probe, Probe] | None = None,
) -> Tensor:
    """As `sheepop.model.attention.attend`, with T times S scores and weights (B, H, T, S) that `probes` see.

    The scores seen are those that enter the softmax: scaled, capped, and masked. The softmax is taken in float32.
    """
    batch, heads, queries, width = q_BHTC.shape
    kv_heads, keys = k_BKSC.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    # The query heads of a key-value head are rows of one product, and what every score is multiplied by is taken into
    # the queries, which are fewer.
    rows_BKRC = (q_BHTC * (scale if soft_cap is None else scale / soft_cap)).reshape(batch, kv_heads, -1, width)
    scores_BHTS = (rows_BKRC @ k_BKSC.transpose(-2, -1)).view(batch, heads, queries, keys)
    if soft_cap is not None:
        # The backward pass of a product does not ask for its result.
        scores_BHTS = scores_BHTS.tanh_()
    scores_BHTS = _masked(scores_BHTS, mask, 1.0 if soft_cap is None else soft_cap)
    if probes is not None:
        scores_BHTS = probes[0](scores_BHTS)
    exact = torch.promote_types(scores_BHTS.dtype, torch.float32)
    if sinks_H is not None:
        sinks = sinks_H.to(exact)[None, :, None, None].expand(batch, heads, queries, 1)
        weights_BHTS = torch.cat((scores_BHTS.to(exact), sinks), dim=-1).softmax(-1)[..., :keys]
    else:
        weights_BHTS = scores_BHTS.softmax(-1, dtype=exact)
    weights_BHTS = weights_BHTS.to(v_BKSC.dtype)
    if probes is not None:
        weights_BHTS = probes[1](weights_BHTS)
    rows_BKRS = F.dropout(weights_BHTS, dropout).reshape(batch, kv_heads, -1, keys)
    return (rows_BKRS @ v_BKSC).view(batch, heads, queries, -1)


def _masked(scores_BHTS: Tensor, mask: AttentionMask, factor: float) -> Tensor:
    """The scores times `factor`, with what `mask` adds to them."""
    added, allowed = mask.bias, mask.allowed
    queries, keys = scores_BHTS.shape[2:]
    if added is None:
        if allowed is None and mask.causal and queries > 1:
            allowed = allowed_by_distance(queries, keys, device=scores_BHTS.device)
        if allowed is None:
            return scores_BHTS if factor == 1.0 else scores_BHTS * factor
        added = scores_BHTS.new_zeros(()).masked_fill(~allowed, -torch.inf)
    added = added.to(scores_BHTS.dtype)
    if torch.is_grad_enabled():
        return torch.add(added, scores_BHTS, alpha=factor)
    return (scores_BHTS if factor == 1.0 else scores_BHTS.mul_(factor)).add_(added)
