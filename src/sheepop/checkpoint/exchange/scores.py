"""What multiplies the attention scores and the embeddings in a foreign ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sheepop.checkpoint.exchange.fields import Settings
from sheepop.checkpoint.exchange.given import Given
from sheepop.model.config import ModelConfig

_LARGEST_ROOT = 2.0**15


def score_scale(config: ModelConfig) -> float:
    """What scores are multiplied by, the usual 1 / sqrt(head_dim) included."""
    return config.score_scale or config.head_size**-0.5


@dataclass(frozen=True)
class ScoreDivisor:
    """`query_pre_attn_scalar`, a whole number of which scores are divided by the root (Gemma)."""

    default: int = 256
    keys: ClassVar[tuple[str, ...]] = ("query_pre_attn_scalar",)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The scale."""
        divisor = given.typed("query_pre_attn_scalar", int, self.default)
        if divisor < 1:
            raise given.problem("query_pre_attn_scalar", "is not positive")
        return {"attention_scale": divisor**-0.5}

    def write(self, config: ModelConfig) -> Settings:
        """The nearest whole number."""
        return {"query_pre_attn_scalar": max(1, round(min(1 / score_scale(config), _LARGEST_ROOT) ** 2))}


@dataclass(frozen=True)
class ScoreScaling:
    """`scale_attn_weights`, true for a division by the root of the head's width and false for none (GPT-2)."""

    keys: ClassVar[tuple[str, ...]] = ("scale_attn_weights",)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The scale 1, or null for the usual one."""
        return {"attention_scale": None if given.typed("scale_attn_weights", bool, True) else 1.0}

    def write(self, config: ModelConfig) -> Settings:
        """False for the scale 1."""
        return {"scale_attn_weights": score_scale(config) != 1.0 or config.head_size == 1}


@dataclass(frozen=True)
class EmbeddingRoot:
    """No key: embeddings are multiplied by the root of their width (Gemma). It stands behind the sizes."""

    keys: ClassVar[tuple[str, ...]] = ()

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The scale."""
        width = settings["d_model"]
        if width < 1:
            raise given.problem("hidden_size", "is not positive")
        return {"embedding_scale": width**0.5}

    def write(self, config: ModelConfig) -> Settings:
        """Nothing."""
        return {}
