"""Mixtures of experts, as llama.cpp has them: in every layer, with a softmax over all experts before the choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.architectures.aspects import Entries, Settings
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.values import u32
from sheepop.model.config import ModelConfig

FEED_FORWARD = "feed_forward_length"
_EXPERT_FEED_FORWARD = "expert_feed_forward_length"
_COUNT = "expert_count"
_USED = "expert_used_count"
_SOFTMAX = 1
_MOST = 512


@dataclass(frozen=True)
class NoExperts:
    """A dense feed-forward network in every layer."""

    fields: tuple[str, ...] = ("d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Experts."""
        if config.experts is not None:
            yield "experts are set, and it has none"

    def write(self, config: ModelConfig) -> Entries:
        """The width."""
        return {FEED_FORWARD: u32(config.ffn_size)}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The width, after making sure that there are no experts."""
        if keys.size(_COUNT, 0) or keys.size(_USED, 0):
            raise keys.problem(_COUNT, "names experts, which this architecture has not")
        return {"d_ff": keys.size(FEED_FORWARD)}


@dataclass(frozen=True)
class Experts:
    """Experts in all layers, or where not `required` in none. With `own_width` their width has a key of its own."""

    required: bool
    own_width: bool
    fields: tuple[str, ...] = ("d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """What a router or an expert does beyond this."""
        experts = config.experts
        if experts is None:
            if self.required:
                yield "experts are not set, and it has them in every layer"
            return
        if not all(config.has_experts(layer) for layer in range(config.num_layers)):
            yield "experts.layers leaves layers out, and it has experts in all or none"
        if experts.count > _MOST:
            yield f"experts.count = {experts.count}, and it has {_MOST} at most"
        if experts.shared:
            yield f"experts.shared = {experts.shared}, and it has none that every token passes"
        if experts.scores != "softmax":
            yield f"experts.scores = {experts.scores}, and it computes softmax"
        if not experts.normalize:
            yield "experts.normalize = False, and it makes the weights of the chosen sum to 1"
        if config.feed_forward_bias:
            yield "feed_forward_bias = True, and its experts have no biases"

    def write(self, config: ModelConfig) -> Entries:
        """The widths and the two counts."""
        experts = config.experts
        if experts is None:
            return {FEED_FORWARD: u32(config.ffn_size)}
        width = experts.d_ff or config.ffn_size
        entries = {FEED_FORWARD: u32(config.ffn_size if self.own_width else width)}
        if self.own_width:
            entries[_EXPERT_FEED_FORWARD] = u32(width)
        return {**entries, _COUNT: u32(experts.count), _USED: u32(experts.per_token)}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The same, refusing every key of a router that we do not compute."""
        count = keys.size(_COUNT, 0)
        found: Settings = {"d_ff": keys.size(FEED_FORWARD)}
        if not count and not self.required:
            return found
        if keys.size("expert_gating_func", _SOFTMAX) not in (0, _SOFTMAX):
            raise keys.problem("expert_gating_func", "is not softmax")
        if not keys.truth("expert_weights_norm", True):
            raise keys.problem("expert_weights_norm", "is false, and llama.cpp makes the weights sum to 1")
        for key, usual in (("expert_weights_scale", (0.0, 1.0)), ("expert_shared_count", (0.0,))):
            value = keys.number(key, 0.0) if key == "expert_weights_scale" else keys.size(key, 0)
            if value not in usual:
                raise keys.problem(key, "is not read for this architecture")
        experts: Settings = {"count": count, "per_token": keys.size(_USED)}
        if self.own_width:
            experts["d_ff"] = keys.size(_EXPERT_FEED_FORWARD)
        # What only training uses is off: a file says nothing of it.
        return {**found, "experts": {**experts, "load_balancing_loss": 0.0, "router_z_loss": 0.0}}
