"""The decoder-only transformer: embedding, positions, blocks, final norm, output projection.

Shapes: B batch, T query positions, S key positions, D d_model, H heads, K kv heads, C head_dim, F d_ff, V vocab.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sheepop.model.attention import causal_mask
from sheepop.model.block import Block
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.norms import build_norm
from sheepop.model.positions import AddedPositions, RotaryPositions


class Transformer(nn.Module):
    """A causal language model. Built on one device; weights are set by `sheepop.model.initialization`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        # Sinusoids have amplitude 1; embeddings are scaled up so that they are not drowned (Vaswani et al. 2017, 3.4).
        self.embedding_scale = math.sqrt(config.d_model) if config.position_encoding == "sinusoidal" else 1.0
        rotary = config.position_encoding == "rope"
        self.added_positions = None if rotary else AddedPositions(config)
        self.rotary_positions = RotaryPositions(config) if rotary else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.lm_head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes the output projection and the embedding one parameter, when the configuration says so."""
        if self.config.tie_weights:
            self.lm_head.weight = self.embedding.weight

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Token ids (B, T) to normalised hidden states (B, T, D), ready for `lm_head`.

        `positions` (B, T), each below `max_seq_len`, default to 0, 1, 2, ... behind what `cache` holds, its left
        padding not counted; `document_ids` (B, T) keep attention within runs of equal ids. Raises `ValueError` for a
        sequence longer than `max_seq_len`, or an argument of another shape.
        """
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must be (B, T), got shape {tuple(input_ids.shape)}")
        num_tokens = input_ids.shape[1]
        past = 0 if cache is None else cache.length
        if num_tokens > self.config.max_seq_len or (positions is None and past + num_tokens > self.config.max_seq_len):
            raise ValueError(f"{past + num_tokens} positions do not fit max_seq_len = {self.config.max_seq_len}")
        if cache is not None and document_ids is not None:
            raise ValueError("document_ids are for packed training batches; a cache holds one document per row")
        key_mask = None if cache is None else cache.key_mask(num_tokens)
        if positions is None and key_mask is not None:
            positions = (key_mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        elif positions is None and past:
            positions = torch.arange(past, past + num_tokens, device=input_ids.device)[None]
        x_BTD = self.embedding(input_ids) * self.embedding_scale
        if self.added_positions is not None:
            x_BTD = self.added_positions(x_BTD, positions)
        rotary = None if self.rotary_positions is None else self.rotary_positions(num_tokens, positions)
        mask = causal_mask(
            num_tokens,
            past + num_tokens,
            document_ids=document_ids,
            key_mask=key_mask,
            device=input_ids.device,
            head_dim=self.config.head_size,
            dropout=self.config.dropout if self.training else 0.0,
        )
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask, rotary, cache)
        if cache is not None:
            cache.advance(num_tokens)
        return self.final_norm(x_BTD)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Token ids (B, T) to logits (B, T, V), or of the last `logits_to_keep` positions only."""
        hidden_BTD = self.hidden_states(input_ids, positions=positions, document_ids=document_ids, cache=cache)
        if logits_to_keep is not None:
            if logits_to_keep < 1:
                raise ValueError(f"logits_to_keep must be at least 1, got {logits_to_keep}")
            hidden_BTD = hidden_BTD[:, -logits_to_keep:]
        return self.lm_head(hidden_BTD)
