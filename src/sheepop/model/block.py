"""One pre-norm transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from sheepop.model.attention import Attention, AttentionMask
from sheepop.model.cache import Cache
from sheepop.model.config import ModelConfig
from sheepop.model.feedforward import FeedForward
from sheepop.model.norms import build_norm


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Applies both sublayers, each on its own residual branch."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), mask, rotary, cache))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
