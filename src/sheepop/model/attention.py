"""Attention: softmax(scale Q K^T + M) V W_O, with one mask for every way of running the network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.block_attention import attend_in_blocks
from sheepop.model.cache import Cache
from sheepop.model.causal_attention import attend_by_products, attend_causally, takes_products
from sheepop.model.config import ModelConfig
from sheepop.model.document_operator import document_attention
from sheepop.model.documents import Segments, attend_in_segments
from sheepop.model.mask import AttentionMask
from sheepop.model.norms import build_norm
from sheepop.model.positions import rotate
from sheepop.model.probe import Probe
from sheepop.model.stepwise_attention import attend_stepwise
from sheepop.model.window_attention import Strips, attend_in_strips


def attend(
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
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1); returns (B, H, T, C).

    K key-value heads serve H query heads in groups of H / K (Ainslie et al. 2023). `scale` is 1 / sqrt(C) when None.
    With `soft_cap` c scores s become ``c tanh(s / c)`` before the mask (Gemma 2, 2024); `sinks_H` are logits that take
    part in every query's softmax and have no value (Agarwal et al. 2025, gpt-oss). `probes` see the scores and the
    weights of an eager mask.

    Raises `ValueError` where mask and arguments do not fit: for a mask without parts over 1 < T < S queries, since
    that triangle has to be built, and for what the form of attention chosen with the mask cannot do.
    """
    num_queries, num_keys = q_BHTC.shape[2], k_BKSC.shape[2]
    if mask.causal and mask.added is None and mask.documents is None and num_queries not in (1, num_keys):
        raise ValueError(f"{num_queries} queries over {num_keys} keys need a mask built by attention_mask")
    if mask.eager:
        return attend_stepwise(
            q_BHTC, k_BKSC, v_BKSC, mask, dropout, scale=scale, soft_cap=soft_cap, sinks_H=sinks_H, probes=probes
        )
    if mask.documents is not None and not isinstance(mask.documents, (Segments, Strips, Tensor)):
        _refuse("dropout under a block mask", dropout)
        return attend_in_blocks(
            q_BHTC,
            k_BKSC,
            v_BKSC,
            mask.documents,
            scale=scale,
            slopes_H=mask.slopes,
            soft_cap=soft_cap,
            sinks_H=sinks_H,
        )
    _refuse("a soft cap in fused attention", soft_cap)
    if isinstance(mask.documents, Strips):
        _refuse("sinks in strips", sinks_H is not None)
        return attend_in_strips(q_BHTC, k_BKSC, v_BKSC, mask.documents, dropout, scale)
    if mask.documents is not None:
        _refuse("sinks among documents", sinks_H is not None)
        if isinstance(mask.documents, Segments):
            return attend_in_segments(q_BHTC, k_BKSC, v_BKSC, mask.documents, dropout, scale)
        _refuse("dropout in compiled attention among documents", dropout)
        if takes_products(q_BHTC):
            return attend_by_products(q_BHTC, k_BKSC, v_BKSC, scale, mask.documents)
        if scale is not None:
            # The operator divides by sqrt(C).
            q_BHTC = q_BHTC * (scale * q_BHTC.shape[-1] ** 0.5)
        return document_attention(q_BHTC, k_BKSC, v_BKSC, mask.documents)[0].transpose(1, 2)
    return _fused(q_BHTC, k_BKSC, v_BKSC, mask, dropout, scale, sinks_H)


def _fused(
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    mask: AttentionMask,
    dropout: float,
    scale: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The fused kernels. A sink is one more key of zeros, whose score is 0, with the sink added to it."""
    added = mask.added
    # One query is the newest position and may see every key; otherwise T = S and the triangle is meant.
    is_causal = mask.causal and added is None and q_BHTC.shape[2] > 1
    if is_causal and sinks_H is None:
        return attend_causally(q_BHTC, k_BKSC, v_BKSC, dropout, scale)
    if sinks_H is not None:
        added = _with_sinks(added, sinks_H, q_BHTC, k_BKSC.shape[2], is_causal)
        k_BKSC, v_BKSC = F.pad(k_BKSC, (0, 0, 0, 1)), F.pad(v_BKSC, (0, 0, 0, 1))
    if added is not None and added.dtype != torch.bool:
        added = added.to(q_BHTC.dtype)
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BKSC,
        v_BKSC,
        attn_mask=added,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q_BHTC.shape[1] != k_BKSC.shape[1],
    )


def _with_sinks(added: Tensor | None, sinks_H: Tensor, q_BHTC: Tensor, num_keys: int, is_causal: bool) -> Tensor:
    """What is added to the scores (B, H, T, S + 1), the sinks in the last column."""
    heads, queries = q_BHTC.shape[1:3]
    if added is None:
        ones = torch.ones(queries, num_keys, dtype=torch.bool, device=q_BHTC.device)
        added = (ones.tril() if is_causal else ones)[None, None]
    if added.dtype == torch.bool:
        added = torch.zeros_like(added, dtype=q_BHTC.dtype).masked_fill(~added, -torch.inf)
    rows = added.shape[0]
    sinks = sinks_H.to(added.dtype)[None, :, None, None].expand(rows, heads, queries, 1)
    return torch.cat((added.expand(rows, heads, queries, num_keys), sinks), dim=-1)


def _refuse(what: str, given: object) -> None:
    if given:
        raise ValueError(f"the mask was built for attention without {what}; tell attention_mask of it")


class Attention(nn.Module):
    """Multi-head attention with grouped key-value heads, of a sequence to itself or to an encoder's states.

    (B, T, D) to (B, T, D).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim, self.value_dim = config.head_size, config.value_size
        self.scale, self.soft_cap = config.score_scale, config.attention_soft_cap
        self.dropout = config.dropout
        q_width, k_width = config.num_heads * config.head_size, config.kv_heads * config.head_size
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(config.d_model, q_width, bias=bias)
        self.k_proj = nn.Linear(config.d_model, k_width, bias=bias)
        self.v_proj = nn.Linear(config.d_model, config.kv_heads * config.value_size, bias=bias)
        self.o_proj = nn.Linear(
            config.num_heads * config.value_size, config.d_model, bias=bool(config.attention_output_bias)
        )
        self.norms_heads = config.qk_norm == "head"
        widths = (config.head_size, config.head_size) if self.norms_heads else (q_width, k_width)
        self.q_norm, self.k_norm = (None if config.qk_norm is None else build_norm(config, width) for width in widths)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        self.q, self.k, self.v = Probe(), Probe(), Probe()
        self.rotated_q, self.rotated_k = Probe(), Probe()
        self.scores, self.weights, self.head_outputs = Probe(), Probe(), Probe()

    @property
    def watched(self) -> bool:
        """Whether someone looks at scores or weights, which fused attention does not have."""
        return bool(self.scores.observers or self.weights.observers)

    def forward(
        self,
        x_BTD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        memory_BSD: Tensor | None = None,
    ) -> Tensor:
        """Attends from the T positions of `x_BTD` to themselves and to what `cache` holds, or to `memory_BSD`."""
        q_BHTC = self.q(self._heads(self.q_proj(x_BTD), self.q_norm, self.head_dim))
        if memory_BSD is None:
            k_BKSC, v_BKSC = self._keys_and_values(x_BTD)
        elif cache is None:
            k_BKSC, v_BKSC = self._keys_and_values(memory_BSD)
        else:
            k_BKSC, v_BKSC = cache.memory(self.layer, lambda: self._keys_and_values(memory_BSD))
        if rotary is not None:
            q_BHTC, k_BKSC = rotate(q_BHTC, *rotary), rotate(k_BKSC, *rotary)
        q_BHTC, k_BKSC = self.rotated_q(q_BHTC), self.rotated_k(k_BKSC)
        if cache is not None and memory_BSD is None:
            k_BKSC, v_BKSC = cache.update(self.layer, k_BKSC, v_BKSC)
        out_BHTC = attend(
            q_BHTC,
            k_BKSC,
            v_BKSC,
            mask,
            self.dropout if self.training else 0.0,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks_H=self.sinks,
            probes=(self.scores, self.weights),
        )
        return self.o_proj(self.head_outputs(out_BHTC).transpose(1, 2).flatten(2))

    def _keys_and_values(self, seen_BSD: Tensor) -> tuple[Tensor, Tensor]:
        k_BKSC = self.k(self._heads(self.k_proj(seen_BSD), self.k_norm, self.head_dim))
        return k_BKSC, self.v(self._heads(self.v_proj(seen_BSD), None, self.value_dim))

    def _heads(self, x_BTE: Tensor, norm: nn.Module | None, width: int) -> Tensor:
        """Cuts projections into heads (B, heads, T, width), normalised before or after the cut."""
        if norm is not None and not self.norms_heads:
            x_BTE = norm(x_BTE)
        x_BTHC = x_BTE.view(*x_BTE.shape[:-1], -1, width)
        return (norm(x_BTHC) if norm is not None and self.norms_heads else x_BTHC).transpose(1, 2)
