"""Gemma 4 in llama.cpp's files: heads of two widths, shared keys, inputs of layers, experts beside a network.

Only the layers without a window rotate by the divisors in a tensor: 1 for the pairs that turn, so much for the others
that they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sheepop.checkpoint.exchange.tensor_rules import JOINED_EXPERTS
from sheepop.checkpoint.gguf.architectures import LLAMA, Architecture, like
from sheepop.checkpoint.gguf.fields import Biases, Heads, ScoreScale, SoftCap, expert_refusals
from sheepop.checkpoint.gguf.rotary import BASE, DEFAULT_BASE, Rotary
from sheepop.checkpoint.gguf.rows import (
    EMBEDDING_AS_IT_IS,
    GATED_FEED_FORWARD,
    LAYER_EMBEDDING_NAME,
    NORMS_BEHIND,
    OUTPUT,
    QUERY_KEY_NORMS,
    Role,
    Row,
    first_and_last_norms,
    linear,
    norm,
    norms_before,
    separate_attention,
)
from sheepop.checkpoint.gguf.windows import Windows
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import EmbeddingRoot, Field, Settings, implied, is_close, sliding, sliding_layers
from sheepop.model.config import ModelConfig

_KV_HEADS, _WIDTHS = "attention.head_count_kv", "feed_forward_length"


class HeadsOfLayers(Heads):
    """The heads of both kinds of layers, the layers that share keys, and those without values. It follows the windows.

    The last layers use the keys of the last two before them, the first of which has a window and the second none.
    """

    covers = (*Heads.covers, "sliding_head_dim", "sliding_num_kv_heads", "shared_kv_layers", "keys_as_values")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of values not as wide as keys, and of layers that share the keys of others."""
        yield from super().refusals(config)
        own = config.num_layers - config.shared_kv_layers
        for layer in range(own, config.num_layers):
            source = own - 1 - (config.window(layer) is not None)
            if config.kv_source(layer) != source:
                yield f"layer {layer} uses the keys of layer {config.kv_source(layer)}, but it uses those of {source}"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the heads of each layer, their two widths, and the number of layers that share keys."""
        wide, narrow = (config.heads_of(sliding=slides) for slides in (False, True))
        counts = [config.heads(layer).kv_heads for layer in range(config.num_layers)]
        return {
            **super().write(config), _KV_HEADS: counts if len(set(counts)) > 1 else counts[0],
            "attention.key_length_swa": narrow.key_width, "attention.value_length_swa": narrow.value_width,
            "rope.dimension_count": wide.key_width, "rope.dimension_count_swa": narrow.key_width,
            "attention.shared_kv_layers": config.shared_kv_layers,
        }  # fmt: skip

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the heads; layers without a tensor of values use their keys."""
        slides, num_layers = sliding_layers(settings), settings["num_layers"]
        counts = _of_layers(given, _KV_HEADS, num_layers)
        kinds = [
            {count for count, slide in zip(counts, slides, strict=True) if slide is kind} for kind in (False, True)
        ]
        if any(len(kind) > 1 for kind in kinds):
            raise given.problem(_KV_HEADS, "does not give all layers of one kind the same number of heads")
        shared = given.typed("attention.shared_kv_layers", int, 0)
        own = range(num_layers - shared)
        width, narrow = given.typed("attention.key_length", int), given.typed("attention.key_length_swa", int)
        for name, keys in (("attention.value_length", width), ("attention.value_length_swa", narrow)):
            if given.typed(name, int, keys) != keys:
                raise given.problem(name, f"is not the {keys} columns of keys")
        for name, turned in (("rope.dimension_count", width), ("rope.dimension_count_swa", narrow)):
            if given.typed(name, int, turned) != turned:
                raise given.problem(name, f"does not rotate whole heads of {turned} columns")
        found: Settings = {
            "num_heads": given.typed("attention.head_count", int), "num_kv_heads": max(kinds[0] or kinds[1]),
            "head_dim": width, "value_head_dim": width, "shared_kv_layers": shared,
            "keys_as_values": tuple(at for at in own if f"blk.{at}.attn_v.weight" not in given.tensors) or None,
        }  # fmt: skip
        if any(slides):
            found["sliding_head_dim"] = None if narrow == width else narrow
            found["sliding_num_kv_heads"] = None if kinds[1] == {found["num_kv_heads"]} else max(kinds[1])
        return found


def _of_layers(given: Given, name: str, num_layers: int) -> list[int]:
    """Returns the number of each layer from a key with a list of them, or one for all."""
    if not isinstance(given.take(name), list):
        return [given.typed(name, int)] * num_layers
    numbers = given.entries(name, int)
    if len(numbers) != num_layers:
        raise given.problem(name, f"has {len(numbers)} entries for {num_layers} layers")
    return numbers


class DenseAndExperts(Field):
    """The width of the dense network of each layer, which experts share in the layers with a router."""

    covers = ("d_ff", "layer_d_ff", "experts")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of other experts."""
        experts = config.experts
        if experts is None:
            return
        if not experts.shared:
            yield "experts.shared = 0, but it has a dense network beside its experts"
        usual = {
            "own_norms": True, "expert_scales": True, "shared_gate": False, "router_bias": False, "normalize": True,
            "scores": "softmax", "scale": 1.0, "groups": 1,
        }  # fmt: skip
        yield from expert_refusals(experts, usual)
        root = config.d_model**-0.5
        if not is_close(experts.router_scale, root):
            yield f"experts.router_scale = {experts.router_scale:g}, but it has {root:g}"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the widths and counts."""
        experts, layers = config.experts, range(config.num_layers)
        if experts is None:
            widths = [config.ffn_width(layer) for layer in layers]
            return {_WIDTHS: widths if len(set(widths)) > 1 else widths[0]}
        width = experts.d_ff or config.ffn_size
        widths = [width * experts.shared if config.has_experts(layer) else config.ffn_width(layer) for layer in layers]
        return {
            _WIDTHS: widths if len(set(widths)) > 1 else widths[0], "expert_feed_forward_length": width,
            "expert_count": experts.count, "expert_used_count": experts.per_token,
        }  # fmt: skip

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the widths, and the experts of the layers that have a router."""
        num_layers = settings["num_layers"]
        widths = _of_layers(given, _WIDTHS, num_layers)
        names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        count, used, width = (given.typed(name, int, 0) for name in names)
        routed = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in given.tensors]
        dense = [widths[layer] for layer in range(num_layers) if layer not in routed]
        found: Settings = {"d_ff": (dense or widths)[0]}
        if len(set(dense)) > 1:
            found["layer_d_ff"] = tuple(
                found["d_ff"] if layer in routed else widths[layer] for layer in range(num_layers)
            )
        if not routed:
            return found
        shared = {widths[layer] for layer in routed}
        if not count or not used or not width or len(shared) > 1 or max(shared) % width:
            raise given.problem(
                names[2],
                f"is not the width of an expert, of which {_WIDTHS} has a whole number in the layers with some",
            )
        experts = {
            "count": count, "per_token": used, "d_ff": width, "shared": max(shared) // width, "own_norms": True,
            "expert_scales": True, "router_scale": max(1, settings["d_model"]) ** -0.5,
            # A file has no training settings, so the auxiliary losses are off.
            "load_balancing_loss": 0.0, "router_z_loss": 0.0,
        }  # fmt: skip
        return {**found, "experts": experts | ({} if len(routed) == num_layers else {"layers": tuple(routed)})}


class LayerInputs(Field):
    """The width of the inputs of layers, 0 for none."""

    covers = ("layer_inputs",)

    def write(self, config: ModelConfig) -> Settings:
        """Returns the width."""
        width = 0 if config.layer_inputs is None else config.layer_inputs.width
        return {"embedding_length_per_layer_input": width}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the width."""
        width = given.typed("embedding_length_per_layer_input", int)
        return {"layer_inputs": {"width": width} if width else None}


@dataclass(frozen=True)
class ProportionalRotary(Rotary):
    """Rotary positions that layers without a window scale by the divisors in a tensor, which all files have."""

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of other positions."""
        scaling = config.rotary_scaling
        if config.position_encoding != "rope" or config.rotary_fraction != 1.0:
            turned = f"{config.position_encoding} of {config.rotary_fraction:g} of a head"
            yield f"position_encoding = {turned}, but it has rope of whole heads"
        elif scaling is None or scaling.kind != "proportional":
            yield f"rotary_scaling is {None if scaling is None else scaling.kind}, but it has proportional"
        elif all(sliding(config)):
            yield "all layers have a window, but only the others have its divisors"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the base; `HeadsOfLayers` writes the rotated columns."""
        return {BASE: config.position_base}

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the base, and the kind of scaling, which a tensor defines."""
        base = given.typed(BASE, float, DEFAULT_BASE)
        scaling = {"kind": "proportional", "factor": 1.0, "fraction": 1.0}
        return {"position_encoding": "rope", "position_base": base, "rotary_scaling": scaling}


_EXPERTS = "blocks.{}.feed_forward"
_SHARED = tuple(
    row for name in ("gate", "up", "down") for row in linear(f"ffn_{name}", f"feed_forward.shared.{name}_proj")
)
_ROWS = (
    *EMBEDDING_AS_IT_IS, *first_and_last_norms(),
    Row(LAYER_EMBEDDING_NAME, ("layer_inputs.embedding.weight",)),
    # llama-quantize leaves this matrix as it is.
    Row("per_layer_model_proj.weight", ("layer_inputs.projection.weight",), Role.PRECISE),
    *norm("per_layer_proj_norm", "layer_inputs.norm"),
    *norms_before(), *NORMS_BEHIND, *separate_attention(), *QUERY_KEY_NORMS, *GATED_FEED_FORWARD, *_SHARED,
    Row("blk.{}.layer_output_scale.weight", ("blocks.{}.factor",), Role.PRECISE),
    Row("blk.{}.ffn_gate_inp.weight", (f"{_EXPERTS}.router.weight",), Role.PRECISE),
    Row("blk.{}.ffn_gate_inp.scale", (f"{_EXPERTS}.router_norm.weight",), Role.SCALE),
    Row("blk.{}.ffn_down_exps.scale", (f"{_EXPERTS}.router.expert_scale",), Role.PRECISE),
    Row(
        "blk.{}.ffn_gate_up_exps.weight", (f"{_EXPERTS}.experts.gate_proj", f"{_EXPERTS}.experts.up_proj"),
        layout=JOINED_EXPERTS,
    ),
    Row("blk.{}.ffn_down_exps.weight", (f"{_EXPERTS}.experts.down_proj",)),
    *norm("blk.{}.ffn_norm", f"{_EXPERTS}.shared_norm"),
    *norm("blk.{}.post_ffw_norm_1", f"{_EXPERTS}.shared_output_norm"),
    *norm("blk.{}.pre_ffw_norm_2", f"{_EXPERTS}.routed_norm"),
    *norm("blk.{}.post_ffw_norm_2", f"{_EXPERTS}.routed_output_norm"),
    *linear("inp_gate", "layer_input.gate_proj"), *linear("proj", "layer_input.o_proj"),
    *norm("blk.{}.post_norm", "blocks.{}.layer_input.norm"),
    *OUTPUT,
)  # fmt: skip

_FIELDS = like(
    LLAMA,
    EmbeddingRoot(),
    *implied(norm_position="sandwich", activation="geglu_tanh", qk_norm="head", value_norm=True),
    Biases("attention_bias", "never"),
    Biases("layer_factor", "optional", "blk.0.layer_output_scale.weight"),
    ScoreScale(fixed=1.0),
    SoftCap("final_logit_softcapping", "logit_soft_cap", 30.0, optional=True),
    ProportionalRotary(),
    Windows(period=None, own_base="unscaled"),
    DenseAndExperts(),
    LayerInputs(),
)
_BESIDE_HEADS = (field for field in _FIELDS if not set(field.covers) & set(HeadsOfLayers.covers))
GEMMA4 = Architecture("gemma4", (*_BESIDE_HEADS, HeadsOfLayers()), _ROWS)
