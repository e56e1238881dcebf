"""Fields of llama.cpp's networks, which are given by keys, by the presence of tensors, or by the architecture.

Each field refuses settings with which llama.cpp would compute something else, writes the others, and reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Field, Settings, is_close, score_scale
from sheepop.model.config import ModelConfig
from sheepop.model.sections import ExpertsConfig

# Whether a file has certain tensors if the model does, always (with zeros if the model does not), or never.
Presence = Literal["optional", "always", "never"]
_FEED_FORWARD = "feed_forward_length"
_EXPERT_FEED_FORWARD = "expert_feed_forward_length"
_COUNT, _USED = "expert_count", "expert_used_count"
# Layers after the last one, which predict further tokens and are left out.
FURTHER_LAYERS = "nextn_predict_layers"
_SOFTMAX = 1
_MOST_EXPERTS = 512


@dataclass(frozen=True)
class Layers(Field):
    """The number of layers, at most that which llama.cpp supports, or for this architecture `most`."""

    most: int = 512
    covers = ("num_layers",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of more layers."""
        if config.num_layers > self.most:
            yield f"num_layers = {config.num_layers}, but it has at most {self.most}"

    def write(self, config: ModelConfig) -> Settings:
        """Returns llama.cpp's key of the number of blocks."""
        return {"block_count": config.num_layers}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the number of layers, if llama.cpp supports as many."""
        num_layers = given.typed("block_count", int) - given.typed(FURTHER_LAYERS, int, 0)
        if num_layers > self.most:
            raise given.problem("block_count", f"is more than the {self.most} layers that llama.cpp allows")
        return {"num_layers": num_layers}


@dataclass(frozen=True)
class SoftCap(Field):
    """A soft cap, 0 for none. `otherwise` is llama.cpp's without the key; it always caps then, unless `optional`."""

    theirs: str
    ours: str
    otherwise: float | None = None
    optional: bool = False

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of no cap if llama.cpp always caps."""
        if self.otherwise is not None and not self.optional and getattr(config, self.ours) is None:
            yield f"{self.ours} is not set, but it always caps"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the cap, if there is one, or that there is none."""
        return {self.theirs: getattr(config, self.ours) or (0.0 if self.optional else None)}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the cap, or llama.cpp's default."""
        return {self.ours: given.typed(self.theirs, float, self.otherwise or 0.0) or None}


@dataclass(frozen=True)
class Biases(Field):
    """Whether some linear layers or norms have biases; the tensor `probe` shows whether optional ones exist."""

    ours: str
    presence: Presence
    probe: str = ""

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of biases that llama.cpp does not read."""
        if self.presence == "never" and getattr(config, self.ours):
            yield f"{self.ours} = True, but it adds no such biases"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns whether the biases exist."""
        return {self.ours: self.presence == "always" or (self.presence == "optional" and self.probe in given.tensors)}


@dataclass(frozen=True)
class TiedWeights(Field):
    """Whether the output projection is tied to the embedding, which the absence of its tensor shows."""

    presence: Presence
    covers = ("tie_weights",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of a separate projection if llama.cpp always uses the embedding."""
        if self.presence == "never" and not config.tie_weights:
            yield "tie_weights = False, but its output projection is always the embedding"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns whether the file has no output projection."""
        return {"tie_weights": "output.weight" not in given.tensors}


@dataclass(frozen=True)
class Heads(Field):
    """The number of heads and their width, which `square` architectures derive from the width of the model.

    If they are not `grouped`, there are as many heads of keys as of queries.
    """

    square: bool = False
    grouped: bool = True
    covers: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of values not as wide as keys, and of heads that do not add up to the model's width."""
        if config.value_size != config.head_size:
            yield f"value_head_dim = {config.value_size} differs from head_dim = {config.head_size}"
        if self.square and config.num_heads * config.head_size != config.d_model:
            yield f"num_heads = {config.num_heads} x head_dim = {config.head_size} is not d_model = {config.d_model}"
        if not self.grouped and config.kv_heads != config.num_heads:
            yield f"num_kv_heads = {config.kv_heads}, but it has as many as num_heads = {config.num_heads}"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the numbers of heads, and their width if it has a key."""
        entries = {"attention.head_count": config.num_heads, "attention.head_count_kv": config.kv_heads}
        if not self.square:
            entries |= {"attention.key_length": config.head_size, "attention.value_length": config.value_size}
        return entries

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the heads; without a key their width is the model's width divided by the heads."""
        heads = given.typed("attention.head_count", int)
        if not heads:
            raise given.problem("attention.head_count", "is not a number of heads")
        shared = settings["d_model"] // heads
        return {
            "num_heads": heads,
            "num_kv_heads": given.typed("attention.head_count_kv", int, heads),
            "head_dim": given.typed("attention.key_length", int, shared),
            "value_head_dim": given.typed("attention.value_length", int, shared),
        }


@dataclass(frozen=True)
class ScoreScale(Field):
    """The scale of the scores: `fixed`, or 1 / sqrt(head_dim), with `odd_layers` layers 1 / sqrt(d_model / num_heads).

    llama.cpp recognises the largest Gemma by its number of layers. muP scales scores and logits by factors for which
    there is no key.
    """

    odd_layers: int | None = None
    fixed: float | None = None
    covers = ("attention_scale", "mup_base_d_model", "mup_base_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of another scale of the scores, and of scaled logits."""
        scale = self._scale(config.num_layers, config.d_model, config.num_heads, config.head_size)
        own = score_scale(config)
        if not is_close(own, scale):
            yield f"the scale of the scores is {own:g}, but it uses {scale:g}"
        if config.width_multiplier != 1.0:
            yield f"mup_base_d_model = {config.mup_base_d_model} scales the logits"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the scale if it is not the usual one."""
        num_layers = settings["num_layers"]
        if num_layers != self.odd_layers:
            return {"attention_scale": self.fixed}
        sizes = (settings[name] for name in ("d_model", "num_heads", "head_dim"))
        return {"attention_scale": self._scale(num_layers, *sizes)}

    def _scale(self, num_layers: int, d_model: int, num_heads: int, head_dim: int) -> float:
        if self.fixed is not None:
            return self.fixed
        width = d_model // num_heads if num_layers == self.odd_layers else head_dim
        return 1 / math.sqrt(max(1, width))


class GivenScale(Field):
    """A key with the scale of attention scores; 0 or a missing key means 1 / sqrt(head_dim) (Granite)."""

    covers = ScoreScale.covers

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of muP's scale of the logits."""
        if config.width_multiplier != 1.0:
            yield f"mup_base_d_model = {config.mup_base_d_model} scales the logits"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the scale, also if it is the usual one."""
        return {"attention.scale": score_scale(config)}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the scale, if there is one."""
        return {"attention_scale": given.typed("attention.scale", float, 0.0) or None}


class SharedNorm(Field):
    """Both sublayers read one norm and their outputs are added, if there is no second norm (StableLM)."""

    covers = ("parallel_residual", "shared_norm")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of parallel sublayers with a norm each."""
        if config.parallel_residual and not config.shared_norm:
            yield "parallel_residual = True, but then both sublayers share a norm"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the key, which llama.cpp does not read."""
        return {"use_parallel_residual": config.parallel_residual}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns whether the second norm is missing."""
        given.take("use_parallel_residual", None)
        return dict.fromkeys(self.covers, "blk.0.ffn_norm.weight" not in given.tensors)


class Pictures(Field):
    """A network that also reads pictures, whose keys do not affect text; its language model is written without them."""

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields that it is only read."""
        yield "it also reads pictures, so SheepOp reads its language model, but does not write it"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Accepts the parts of positions, which are equal for text, and the layers that read pictures."""
        for name in ("rope.dimension_sections", "n_deepstack_layers"):
            given.take(name, None)
        return {}


class NoExperts(Field):
    """A dense feed-forward network in every layer."""

    covers = ("d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of experts."""
        if config.experts is not None:
            yield "experts are set, but it has none"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the width of the feed-forward network."""
        return {_FEED_FORWARD: config.ffn_size}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the width; refuses experts."""
        if given.typed(_COUNT, int, 0) or given.typed(_USED, int, 0):
            raise given.problem(_COUNT, "means experts, which this architecture does not have")
        return {"d_ff": given.typed(_FEED_FORWARD, int)}


def expert_refusals(experts: ExpertsConfig, usual: Settings) -> Iterator[str]:
    """Yields a refusal of more experts than llama.cpp allows, and of each setting that differs from the `usual`."""
    if experts.count > _MOST_EXPERTS:
        yield f"experts.count = {experts.count}, but it has at most {_MOST_EXPERTS}"
    for name, value in usual.items():
        if getattr(experts, name) != value:
            yield f"experts.{name} = {getattr(experts, name)}, but it has {value}"


@dataclass(frozen=True)
class Experts(Field):
    """Experts in all layers, or in none unless `required`. With `own_width` their width has a separate key.

    With `biased`, router and experts always have biases; `normalizes` is whether the weights of the chosen ones are
    divided by their sum.
    """

    required: bool
    own_width: bool
    biased: bool = False
    normalizes: bool = True
    covers = ("d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of router and expert features that llama.cpp lacks."""
        experts = config.experts
        if experts is None:
            if self.required:
                yield "experts are not set, but it has them in every layer"
            return
        if not all(config.has_experts(layer) for layer in range(config.num_layers)):
            yield "experts.layers leaves layers out, but it has experts in all or none"
        if experts.shared:
            yield f"experts.shared = {experts.shared}, but it has no shared experts"
        if experts.scores != "softmax":
            yield f"experts.scores = {experts.scores}, but it computes softmax"
        usual = {"own_norms": False, "expert_scales": False, "router_scale": 1.0, "normalize": self.normalizes}
        yield from expert_refusals(experts, usual)
        if (experts.groups, experts.scale) != (1, 1.0):
            yield f"experts.groups = {experts.groups} and scale = {experts.scale:g}, but it has neither"
        if experts.router_bias is not self.biased:
            yield f"experts.router_bias = {experts.router_bias}, but its router has {'a' if self.biased else 'no'} bias"
        if config.feed_forward_bias is not self.biased:
            has = "have" if self.biased else "have no"
            yield f"feed_forward_bias = {config.feed_forward_bias}, but its experts {has} biases"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the widths and the two counts."""
        experts = config.experts
        if experts is None:
            return {_FEED_FORWARD: config.ffn_size}
        width = experts.d_ff or config.ffn_size
        widths = {_FEED_FORWARD: width}
        if self.own_width:
            widths = {_FEED_FORWARD: config.ffn_size, _EXPERT_FEED_FORWARD: width}
        return {**widths, _COUNT: experts.count, _USED: experts.per_token}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the experts; refuses router settings that we do not support."""
        count = given.typed(_COUNT, int, 0)
        found: Settings = {"d_ff": given.typed(_FEED_FORWARD, int)}
        if not count and not self.required:
            return found
        if given.typed("expert_gating_func", int, _SOFTMAX) not in (0, _SOFTMAX):
            raise given.problem("expert_gating_func", "is not softmax")
        if given.typed("expert_weights_norm", bool, self.normalizes) is not self.normalizes:
            does = "normalises" if self.normalizes else "does not normalise"
            raise given.problem("expert_weights_norm", f"is {not self.normalizes}, but llama.cpp {does} the weights")
        for key, kind, usual in (("expert_weights_scale", float, (0.0, 1.0)), ("expert_shared_count", int, (0,))):
            if given.typed(key, kind, usual[0]) not in usual:
                raise given.problem(key, "is not supported for this architecture")
        experts: Settings = {"count": count, "per_token": given.typed(_USED, int), "router_bias": self.biased}
        experts["normalize"] = self.normalizes
        if self.own_width:
            experts["d_ff"] = given.typed(_EXPERT_FEED_FORWARD, int)
        # A file has no training settings, so the auxiliary losses are off.
        return {**found, "experts": {**experts, "load_balancing_loss": 0.0, "router_z_loss": 0.0}}
