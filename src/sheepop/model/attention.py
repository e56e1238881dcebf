"""Causal self-attention: softmax(Q K^T / sqrt(C) + M) V W_O, with one mask for every way of running the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.document_operator import document_attention
from sheepop.model.documents import (
    Segments,
    attend_in_blocks,
    attend_in_segments,
    block_mask,
    has_block_kernel,
    number_documents,
)
from sheepop.model.positions import rotate


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see. With neither part it is the plain lower triangle over the last T of S keys.

    `allowed` is boolean, (B, 1, T, S) or broadcastable to it; `documents` says the same of documents in a row
    without as many entries, in the form that the kernel at hand reads: cut into segments, as blocks, or as running
    numbers (B, T). `causal_mask` is the only place that builds one, and what it builds lies within that
    triangle, so no setting lets a query see the future.
    """

    allowed: Tensor | None = None
    documents: Segments | BlockMask | Tensor | None = None


def causal_mask(
    num_queries: int,
    num_keys: int,
    *,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    head_dim: int = 0,
    dropout: float = 0.0,
) -> AttentionMask:
    """The mask for T queries that are the last T of S keys.

    `document_ids` (B, S) keeps attention within a run of equal ids (S = T then); `key_mask` (B, S) is False at
    padding. A padded query sees itself, which keeps its softmax finite; nothing reads its result. `head_dim` and
    `dropout` are those of the attention to come: not every kernel serves all. Raises `ValueError` when a shape does
    not fit.
    """
    for name, given in (("document_ids", document_ids), ("key_mask", key_mask)):
        if given is not None and (given.ndim != 2 or given.shape[1] != num_keys):
            raise ValueError(f"{name} has shape {tuple(given.shape)}; a row for each sequence of {num_keys} is needed")
    if document_ids is not None and num_queries != num_keys:
        raise ValueError(f"document_ids need every position as a query; got {num_queries} of {num_keys}")
    if document_ids is None and key_mask is None and num_queries in (1, num_keys):
        return AttentionMask()
    documents = None if document_ids is None else number_documents(document_ids)
    if documents is not None and key_mask is None:
        if dropout == 0 and has_block_kernel(documents.device, head_dim):
            return AttentionMask(documents=block_mask(documents))
        # Where documents begin differs from batch to batch; compiled code would be made anew for each.
        if not torch.compiler.is_compiling():
            return AttentionMask(documents=Segments.of(documents))
        if dropout == 0 and documents.device.type == "cpu":
            return AttentionMask(documents=documents)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None, :]
    allowed = (keys <= queries)[None, None]
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if key_mask is not None:
        allowed = (allowed & key_mask[:, None, None, :]) | (keys == queries)[None, None]
    return AttentionMask(allowed)


def attend(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1); returns (B, H, T, C).

    K key-value heads serve H query heads in groups of H / K (Ainslie et al. 2023). Raises `ValueError` for a mask
    without parts over 1 < T < S queries: that triangle has to be built; and for dropout under a block mask.
    """
    num_queries, num_keys = q_BHTC.shape[2], k_BKSC.shape[2]
    if isinstance(mask.documents, Segments):
        return attend_in_segments(q_BHTC, k_BKSC, v_BKSC, mask.documents, dropout)
    if mask.documents is not None:
        if dropout:
            raise ValueError("a mask for attention without dropout was built; tell causal_mask of the dropout")
        if isinstance(mask.documents, Tensor):
            return document_attention(q_BHTC, k_BKSC, v_BKSC, mask.documents)[0].transpose(1, 2)
        return attend_in_blocks(q_BHTC, k_BKSC, v_BKSC, mask.documents)
    if mask.allowed is None and num_queries not in (1, num_keys):
        raise ValueError(f"{num_queries} queries over {num_keys} keys need a mask built by causal_mask")
    # One query is the newest position and may see every key; otherwise T = S and the triangle is meant. Compiled, the
    # comparison is a symbol, which only a branch turns into a bool.
    is_causal = True if mask.allowed is None and num_queries > 1 else False  # noqa: SIM210
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BKSC,
        v_BKSC,
        attn_mask=mask.allowed,
        dropout_p=dropout,
        is_causal=is_causal,
        enable_gqa=q_BHTC.shape[1] != k_BKSC.shape[1],
    )


class Attention(nn.Module):
    """Multi-head attention with grouped key-value heads; (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_size
        self.attention_dropout = config.dropout
        q_width, kv_width = config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.d_model, q_width, bias=config.bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=config.bias)

    def forward(
        self,
        x_BTD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attends from the T positions of `x_BTD` to themselves and to what `cache` holds."""
        q_BHTC, k_BKTC, v_BKTC = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary is not None:
            q_BHTC, k_BKTC = rotate(q_BHTC, *rotary), rotate(k_BKTC, *rotary)
        keys, values = (k_BKTC, v_BKTC) if cache is None else cache.update(self.layer, k_BKTC, v_BKTC)
        out_BHTC = attend(q_BHTC, keys, values, mask, self.attention_dropout if self.training else 0.0)
        return self.o_proj(out_BHTC.transpose(1, 2).flatten(2))
