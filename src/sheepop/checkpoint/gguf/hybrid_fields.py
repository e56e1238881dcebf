"""Properties of networks with latent attention, with layers without attention, or with routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from sheepop.checkpoint.gguf.fields import Heads, expert_refusals
from sheepop.checkpoint.gguf.rotary import ATTENTION_FACTOR, Rotary
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Field,
    Settings,
    all_but_every,
    is_close,
    score_scale,
    yarn_attention_factor,
)
from sheepop.model.config import ModelConfig

SOFTMAX, SIGMOID = 1, 2
_KV_HEADS = "attention.head_count_kv"
_RECURRENT, _PERIOD = "attention.recurrent_layers", "full_attention_interval"
_YARN_LOG = "rope.scaling.yarn_log_multiplier"


@dataclass(frozen=True)
class RoutedExperts(Field):
    """Experts in all layers, or in all but the first ones; `shared` is whether and how some process every token.

    Files may have a key for the function of the scores, one of `scores`, and with `choices` keys for normalisation,
    factor and groups of experts. Without these keys `normalizes` says whether the weights are normalised.
    """

    scores: tuple[int, ...]
    shared: Literal["none", "counted", "gated"] = "none"
    leading: bool = False
    choices: bool = False
    normalizes: bool = True
    covers = ("d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of what llama.cpp computes otherwise, or not at all."""
        experts, num_layers = config.experts, config.num_layers
        if experts is None:
            yield "experts are not set, but it has them"
            return
        with_experts = [config.has_experts(layer) for layer in range(num_layers)]
        if not with_experts[-1] or with_experts != sorted(with_experts) or not (self.leading or with_experts[0]):
            yield "experts.layers leaves other layers out than it does"
        if _SCORES[experts.scores] not in self.scores:
            yield f"experts.scores = {experts.scores}, but it computes another function"
        has_shared = {"none": (False, False), "counted": (True, False), "gated": (True, True)}[self.shared]
        if (experts.shared > 0, experts.shared_gate) != has_shared:
            yield f"experts.shared = {experts.shared} and shared_gate = {experts.shared_gate}, but it has {self.shared}"
        usual = {"router_bias": False, "own_norms": False, "expert_scales": False, "router_scale": 1.0}
        usual |= {} if self.choices else {"normalize": self.normalizes, "scale": 1.0, "groups": 1}
        yield from expert_refusals(experts, usual)
        if experts.groups > 1 and experts.group_top != 2:
            yield f"experts.group_top = {experts.group_top}, but it adds two scores"
        if config.feed_forward_bias:
            yield "feed_forward_bias = True, but its experts have no biases"

    def write(self, config: ModelConfig) -> Settings:
        """Returns widths, counts and choices."""
        experts = config.experts
        assert experts is not None
        width = experts.d_ff or config.ffn_size
        found: Settings = {
            "feed_forward_length": config.ffn_size, "expert_feed_forward_length": width,
            "expert_count": experts.count, "expert_used_count": experts.per_token,
            "expert_gating_func": _SCORES[experts.scores],
        }  # fmt: skip
        if self.leading:
            dense = (not config.has_experts(layer) for layer in range(config.num_layers))
            found["leading_dense_block_count"] = sum(dense)
        if self.shared == "counted":
            found["expert_shared_count"] = experts.shared
        if self.shared == "gated":
            found["expert_shared_feed_forward_length"] = experts.shared * width
        if self.choices:
            found |= {"expert_weights_norm": experts.normalize, "expert_weights_scale": experts.scale}
        if experts.groups > 1:
            found |= {"expert_group_count": experts.groups, "expert_group_used_count": experts.groups_per_token}
        return found

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the experts."""
        width = given.typed("expert_feed_forward_length", int)
        gating = given.typed("expert_gating_func", int, 0) or self.scores[0]
        if gating not in self.scores:
            raise given.problem("expert_gating_func", "is not a function of the scores that SheepOp supports here")
        experts: Settings = {
            "count": given.typed("expert_count", int), "per_token": given.typed("expert_used_count", int),
            "d_ff": width,
            "scores": next(name for name, number in _SCORES.items() if number == gating),
            "normalize": self.normalizes,
            # A file has no training settings, so the auxiliary losses are off.
            "load_balancing_loss": 0.0, "router_z_loss": 0.0,
        }  # fmt: skip
        dense = given.typed("leading_dense_block_count", int, 0) if self.leading else 0
        if not 0 <= dense < settings["num_layers"]:
            raise given.problem("leading_dense_block_count", "leaves no layer with experts")
        if dense:
            experts["layers"] = tuple(range(dense, settings["num_layers"]))
        if self.shared == "counted":
            experts["shared"] = given.typed("expert_shared_count", int)
        if self.shared == "gated":
            shared = given.typed("expert_shared_feed_forward_length", int, width)
            if not width or shared % width:
                raise given.problem(
                    "expert_shared_feed_forward_length", f"is not a multiple of the {width} of an expert"
                )
            experts |= {"shared": shared // width, "shared_gate": True}
        if self.choices:
            experts["normalize"] = given.typed("expert_weights_norm", bool, False)
            experts["scale"] = given.typed("expert_weights_scale", float, 0.0) or 1.0
            groups = given.typed("expert_group_count", int, 0) or 1
            used = given.typed("expert_group_used_count", int, 0) or 1
            if groups > 1:
                experts |= {"groups": groups, "groups_per_token": used, "group_top": 2}
        return {"d_ff": given.typed("feed_forward_length", int, width), "experts": experts}


_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


class OptionalHeadNorms(Field):
    """Norms of queries and keys over each head, if a file has them (GLM-4.5)."""

    covers = ("qk_norm",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of norms over something else."""
        if config.qk_norm not in (None, "head"):
            yield f"qk_norm = {config.qk_norm}, but it normalises each head with the same weights"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns whether the file has them."""
        return {"qk_norm": "head" if "blk.0.attn_q_norm.weight" in given.tensors else None}


class HeadsBesideConvolutions(Heads):
    """The heads of the layers with attention; the others, with 0 key-value heads, have gated convolutions (LFM 2)."""

    covers: ClassVar[tuple[str, ...]] = (*Heads.covers, "gated_convolution")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of other heads, and of convolutions that are missing or have biases."""
        yield from super().refusals(config)
        if config.gated_convolution is None or config.gated_convolution.bias:
            yield "gated_convolution is not set, or has biases, but it has some without"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the heads of each layer, and the width of the convolutions."""
        assert config.gated_convolution is not None
        mixes = [config.mixer(layer) is not None for layer in range(config.num_layers)]
        counts = {_KV_HEADS: [0 if mixer else config.kv_heads for mixer in mixes]}
        return {**super().write(config), **counts, "shortconv.l_cache": config.gated_convolution.width}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the heads, and the layers with convolutions."""
        counts = given.entries(_KV_HEADS, int)
        attending = {count for count in counts if count}
        if len(counts) != settings["num_layers"] or len(attending) != 1:
            raise given.problem(_KV_HEADS, "does not give each layer the same number of heads, or 0")
        heads = given.typed("attention.head_count", int)
        if not heads:
            raise given.problem("attention.head_count", "is not a number of heads")
        width = settings["d_model"] // heads
        layers = tuple(layer for layer, count in enumerate(counts) if not count)
        convolutions = {"layers": layers, "width": given.typed("shortconv.l_cache", int)} if layers else None
        for name in ("attention.key_length", "attention.value_length"):
            if given.typed(name, int, width) != width:
                raise given.problem(name, f"is not the {width} that llama.cpp computes with")
        return {
            "num_heads": heads, "num_kv_heads": attending.pop(), "head_dim": width, "value_head_dim": width,
            "gated_convolution": convolutions,
        }  # fmt: skip


class DeltaNet(Field):
    """The Gated DeltaNet, and which layers have it (Qwen)."""

    covers = ("gated_delta_net",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of a network without a Gated DeltaNet, and of values that are not as wide as keys."""
        section = config.gated_delta_net
        if section is None:
            yield "gated_delta_net is not set, but it has one in some layers"
        elif section.key_head_dim != section.value_head_dim:
            yield "gated_delta_net.value_head_dim differs from key_head_dim"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the sizes of the Gated DeltaNet and the layers that have it."""
        section, num_layers = config.gated_delta_net, config.num_layers
        assert section is not None
        mixes = [layer in section.layers for layer in range(num_layers)]
        periods = (period for period in range(1, num_layers + 1) if all_but_every(period, num_layers) == mixes)
        period = next(periods, None)
        return {
            "ssm.conv_kernel": section.width, "ssm.state_size": section.key_head_dim,
            "ssm.group_count": section.num_key_heads, "ssm.time_step_rank": section.num_value_heads,
            "ssm.inner_size": section.value_width, **({_RECURRENT: mixes} if period is None else {_PERIOD: period}),
        }  # fmt: skip

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the section."""
        names = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")
        width, size, keys, values, inner = (given.typed(name, int) for name in names)
        if inner != size * values:
            raise given.problem("ssm.inner_size", f"is not ssm.state_size x ssm.time_step_rank = {size * values}")
        num_layers, period = settings["num_layers"], given.typed(_PERIOD, int, 4)
        mixes = all_but_every(period or num_layers + 1, num_layers)
        if given.take(_RECURRENT, None) is not None:
            mixes = [bool(number) for number in given.entries(_RECURRENT, int)]
            mixes = mixes[:num_layers] if len(mixes) == given.typed("block_count", int) else []
        if not any(mixes):
            raise given.problem(_RECURRENT, f"is not a list for {num_layers} layers, some of which it names")
        return {
            "gated_delta_net": {
                "layers": tuple(layer for layer, mixer in enumerate(mixes) if mixer), "width": width,
                "num_key_heads": keys, "num_value_heads": values, "key_head_dim": size, "value_head_dim": size,
            }
        }  # fmt: skip


class PositionSections(Field):
    """Which columns rotate by which of three positions, which are equal for text (Qwen 3.5)."""

    def write(self, config: ModelConfig) -> Settings:
        """Returns three equal sections, without which llama.cpp refuses a file."""
        pairs = config.rotary_dim // 2
        return {"rope.dimension_sections": [*((pairs + more) // 3 for more in (2, 1, 0)), 0]}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Accepts any sections."""
        given.take("rope.dimension_sections", None)
        return {}


class Latents(Field):
    """The widths of latent attention, and the scale of the scores with YaRN (DeepSeek).

    llama.cpp decides by the number of layers whether queries have a latent, and norms latents with the epsilon of the
    other norms.
    """

    covers = (*Heads.covers, "latent_attention", "attention_scale", "mup_base_d_model", "mup_base_head_dim")
    _without_queries = (26, 27)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of other attention, and of a scale or an epsilon for which there is no key."""
        latent, scaling = config.latent_attention, config.rotary_scaling
        if latent is None:
            yield "latent_attention is not set, but it has only that"
            return
        if (latent.q_rank is None) != (config.num_layers in self._without_queries):
            yield f"latent_attention.q_rank = {latent.q_rank} with {config.num_layers} layers, for which it has another"
        if not is_close(latent.norm_eps, config.norm_eps):
            yield f"latent_attention.norm_eps = {latent.norm_eps:g} differs from norm_eps = {config.norm_eps:g}"
        if config.width_multiplier != 1.0:
            yield f"mup_base_d_model = {config.mup_base_d_model} scales the logits"
        is_yarn = scaling is not None and scaling.kind == "yarn"
        if not is_yarn and not is_close(score_scale(config), config.head_size**-0.5):
            yield f"the scale of the scores is {score_scale(config):g}, but it uses {config.head_size**-0.5:g}"
        if is_yarn and (scaling is None or not is_close(scaling.attention_factor or 0.0, 1.0) or scaling.factor <= 1.0):
            yield "rotary_scaling.attention_factor is not 1, but it scales only the scores"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the widths, also those of the one head that its cache holds."""
        latent, scaling = config.latent_attention, config.rotary_scaling
        assert latent is not None
        found: Settings = {
            "attention.head_count": config.num_heads, _KV_HEADS: 1,
            "attention.q_lora_rank": latent.q_rank, "attention.kv_lora_rank": latent.kv_rank,
            "attention.key_length": latent.kv_rank + latent.rope_head_dim, "attention.value_length": latent.kv_rank,
            "attention.key_length_mla": config.head_size, "attention.value_length_mla": config.value_size,
        }  # fmt: skip
        if scaling is not None and scaling.kind == "yarn":
            root = (score_scale(config) * config.head_size**0.5) ** 0.5
            found[_YARN_LOG] = 0.1 * (root - 1) / (yarn_attention_factor(scaling.factor) - 1)
        return found

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the section; the scale follows when the positions are known."""
        heads, rank = given.typed("attention.head_count", int), given.typed("attention.kv_lora_rank", int)
        width = given.typed("attention.key_length_mla", int)
        for name in ("attention.key_length", "attention.value_length", _KV_HEADS):
            given.take(name, None)
        return {
            "num_heads": heads, "num_kv_heads": heads, "head_dim": width,
            "value_head_dim": given.typed("attention.value_length_mla", int),
            "latent_attention.kv_rank": rank,
            "latent_attention.q_rank": given.typed("attention.q_lora_rank", int, 0) or None,
            "latent_attention.norm_eps": settings["norm_eps"],
        }  # fmt: skip


class LatentRotary(Rotary):
    """Rotary positions of the shared columns of keys; with YaRN the scores are scaled, and not the angles."""

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields the refusals of positions, except the refusal of heads that rotate in part."""
        yield from replace(self, partial=True)._refusals(config)

    def write(self, config: ModelConfig) -> Settings:
        """Returns base, number of rotated columns, and scaling."""
        return {name: value for name, value in super().write(config).items() if name != ATTENTION_FACTOR}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the number of rotated columns, base and scaling, and the scale of the scores."""
        turned, width = given.typed("rope.dimension_count", int), settings["head_dim"]
        found = super().read(given, {**settings, "head_dim": turned})
        found["latent_attention.rope_head_dim"] = turned
        log_multiplier = given.typed(_YARN_LOG, float, 0.0)
        if (scaling := found.get("rotary_scaling")) is not None and scaling["kind"] == "yarn":
            if not log_multiplier:
                raise given.problem(_YARN_LOG, "is missing, and without it the scale of the scores is not known")
            scaling["attention_factor"] = 1.0
            root = yarn_attention_factor(scaling["factor"], 10 * log_multiplier)
            found["attention_scale"] = root**2 * max(1, width) ** -0.5
        return found
