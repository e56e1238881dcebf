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
    groups = (batch, kv_heads, heads // kv_heads, queries)
    scale = width**-0.5 if scale is None else scale
    q_BKGTC = q_BHTC.reshape(*groups, width)
    scores_BHTS = (q_BKGTC @ k_BKSC[:, :, None].transpose(-2, -1)).flatten(1, 2) * scale
    if soft_cap is not None:
        scores_BHTS = soft_cap * torch.tanh(scores_BHTS / soft_cap)
    scores_BHTS = _masked(scores_BHTS, mask)
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
    weights_BKGTS = F.dropout(weights_BHTS, dropout).view(*groups, keys)
    return (weights_BKGTS @ v_BKSC[:, :, None]).flatten(1, 2)


def _masked(scores_BHTS: Tensor, mask: AttentionMask) -> Tensor:
    if mask.bias is not None:
        return scores_BHTS + mask.bias.to(scores_BHTS.dtype)
    allowed = mask.allowed
    queries, keys = scores_BHTS.shape[2:]
    if allowed is None and mask.causal and queries > 1:
        allowed = allowed_by_distance(queries, keys, device=scores_BHTS.device)
    return scores_BHTS if allowed is None else scores_BHTS.masked_fill(~allowed, -torch.inf)
