"""The heads of attention, as llama.cpp has them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.architectures.aspects import Entries, Settings, is_close
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.values import u32
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class Heads:
    """The heads and their width, which `square` architectures take from the width of the model."""

    square: bool = False
    fields: tuple[str, ...] = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Values of another width than keys, and heads that do not fill the width of the model where they must."""
        if config.value_size != config.head_size:
            yield f"value_head_dim = {config.value_size} differs from head_dim = {config.head_size}"
        if self.square and config.num_heads * config.head_size != config.d_model:
            yield f"num_heads = {config.num_heads} of head_dim = {config.head_size} are not d_model = {config.d_model}"

    def write(self, config: ModelConfig) -> Entries:
        """Two numbers, and the width."""
        entries = {"attention.head_count": u32(config.num_heads), "attention.head_count_kv": u32(config.kv_heads)}
        if not self.square:
            entries["attention.key_length"] = u32(config.head_size)
            entries["attention.value_length"] = u32(config.value_size)
        return entries

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The same; without a width the heads share that of the model."""
        heads = keys.size("attention.head_count")
        if not heads:
            raise keys.problem("attention.head_count", "is no number of heads")
        shared = settings["d_model"] // heads
        return {
            "num_heads": heads,
            "num_kv_heads": keys.size("attention.head_count_kv", heads),
            "head_dim": keys.size("attention.key_length", shared),
            "value_head_dim": keys.size("attention.value_length", shared),
        }


@dataclass(frozen=True)
class ScoreScale:
    """The scale of the scores: 1 / sqrt(head_dim), or for a model of `odd_layers` layers 1 / sqrt(d_model / num_heads).

    The second is how llama.cpp tells the largest Gemma from the others. muP would scale scores and logits by factors
    that no key expresses.
    """

    odd_layers: int | None = None
    fields: tuple[str, ...] = ("attention_scale", "mup_base_d_model", "mup_base_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another scale of scores, or a scale of logits."""
        scale = self._scale(config.num_layers, config.d_model, config.num_heads, config.head_size)
        own = config.score_scale or 1 / math.sqrt(config.head_size)
        if not is_close(own, scale):
            yield f"the scores are multiplied by {own:g}, and it multiplies them by {scale:g}"
        if config.width_multiplier != 1.0:
            yield f"mup_base_d_model = {config.mup_base_d_model} scales the logits"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The scale where it is not the usual one."""
        num_layers, heads = settings["num_layers"], settings["num_heads"]
        if num_layers != self.odd_layers:
            return {}
        return {"attention_scale": self._scale(num_layers, settings["d_model"], heads, settings["head_dim"])}

    def _scale(self, num_layers: int, d_model: int, num_heads: int, head_dim: int) -> float:
        width = d_model // num_heads if num_layers == self.odd_layers else head_dim
        return 1 / math.sqrt(max(1, width))
