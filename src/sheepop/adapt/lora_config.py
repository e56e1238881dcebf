"""The settings of LoRA, in a module without torch."""

from __future__ import annotations

import math

from pydantic import Field

from sheepop.core.config import Config


class LoraConfig(Config):
    """The layers, rank and scale of a low-rank adapter."""

    rank: int = Field(8, ge=1, le=4096, strict=True)
    """Rank of the adapter: columns of B and rows of A."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapter, whose output is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs that training sets to zero."""
    targets: tuple[str, ...] = Field(("blocks.*",), min_length=1)
    """Patterns that match the path, or the end of the path, of the layers to adapt: `q_proj`, `attention.*`,
    `embedding`; by default all linear layers of all blocks."""
    rank_stabilised: bool = False
    """Whether the scale is alpha / sqrt(rank) instead."""
    dora: bool = False
    """Whether DoRA learns the length of each weight row separately from its direction."""

    @property
    def scale(self) -> float:
        """The factor s of ``B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)
