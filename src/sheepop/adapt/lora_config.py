"""The settings of LoRA, apart from its layers, which need torch."""

from __future__ import annotations

import math

from pydantic import Field

from sheepop.core.config import Config


class LoraConfig(Config):
    """A change of low rank: where it is made, and how large it may get."""

    rank: int = Field(8, ge=1, le=4096, strict=True)
    """Columns of B and rows of A."""
    alpha: float = Field(16.0, gt=0)
    """The change is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the inputs of A that is set to zero while training."""
    targets: tuple[str, ...] = Field(("blocks.*",), min_length=1)
    """Patterns of the layers that are changed, by their path or its end: `q_proj`, `attention.*`, `embedding`; all
    linear layers of all blocks by default."""
    rank_stabilised: bool = False
    """Multiplies by alpha / sqrt(rank) instead."""
    dora: bool = False
    """Learns the length of each row of the changed weights apart from its direction."""

    @property
    def scale(self) -> float:
        """The factor s of the change."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)
