"""Gemma 4 (text): heads of two widths, shared keys and values, inputs of layers, experts beside a dense network."""

from __future__ import annotations

from typing import Any

from sheepop.checkpoint.exchange.families import llama
from sheepop.checkpoint.exchange.families.gemma import NORMS, TANH
from sheepop.checkpoint.exchange.families.llama import LAYER
from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.fields import Activation, windows_by_period
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters
from sheepop.checkpoint.exchange.tensor_rules import BLOCK, EXPERTS, JOINED_EXPERTS, TensorRule, router, same, under
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    EmbeddingRoot,
    Field,
    Settings,
    fixed,
    implied,
    is_close,
    number,
    sliding_layers,
    without,
)
from sheepop.model.config import ModelConfig

_PER_LAYER = "per_layer_config"


class HeadsOfLayers(Field):
    """The key-value heads of layers with and without a window; this field must follow the windows.

    `global_head_dim` and `num_global_key_value_heads` are those of the layers without one, in files of newer versions
    of transformers in the table `per_layer_config`.
    """

    theirs = _PER_LAYER

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the heads of both kinds of layers, and the layers whose values are their keys."""
        num_layers = settings["num_layers"]
        slides = sliding_layers(settings)
        if slides[-1]:
            raise given.problem("layer_types", "ends with a sliding_attention, for which transformers takes another")
        width = given.typed("head_dim", int, 256)
        counts = given.typed("num_key_value_heads", int, 4)
        as_values = given.typed("attention_k_eq_v", bool, False)
        whole = {
            "head_dim": given.typed("global_head_dim", int, 512),
            "num_key_value_heads": given.typed("num_global_key_value_heads", int, None, optional=True),
        }
        if not as_values or whole["num_key_value_heads"] is None:
            whole["num_key_value_heads"] = counts
        if given.has(_PER_LAYER):
            whole = _heads_by_layer(given, slides, {"head_dim": width, "num_key_value_heads": counts})
        else:
            given.take(_PER_LAYER, None)
        shared = given.typed("num_kv_shared_layers", int, 0)
        as_keys = [layer for layer in range(num_layers - shared) if not slides[layer]] if as_values else []
        found = {
            "head_dim": whole["head_dim"],
            "num_kv_heads": whole["num_key_value_heads"],
            "shared_kv_layers": shared,
            "keys_as_values": tuple(as_keys) or None,
        }
        if any(slides):
            found["sliding_head_dim"] = None if width == whole["head_dim"] else width
            found["sliding_num_kv_heads"] = None if counts == whole["num_key_value_heads"] else counts
        return found

    def write(self, config: ModelConfig) -> Settings:
        """Returns the older spelling."""
        return {
            "head_dim": config.sliding_head_dim or config.head_size,
            "num_key_value_heads": config.sliding_num_kv_heads or config.kv_heads,
            "global_head_dim": config.head_size,
            "num_global_key_value_heads": config.kv_heads,
            "attention_k_eq_v": config.keys_as_values is not None,
            "num_kv_shared_layers": config.shared_kv_layers,
        }


def _heads_by_layer(given: Given, slides: list[bool], usual: dict[str, int]) -> dict[str, int]:
    """Returns the heads of the layers without a window from the table that gives them layer by layer."""
    table = given.within(_PER_LAYER, given.take(_PER_LAYER))
    # The numbers of layers may begin with zeros.
    names = {int(name): name for name in table.unread() if name.isdecimal() and len(name) < 10}
    found: list[dict[str, int]] = []
    for layer, slide in enumerate(slides):
        name = names.get(layer, str(layer))
        own = table.within(name, table.take(name, {}))
        heads = {name: own.typed(name, int, value) for name, value in usual.items()}
        if own.unread() or (slide and heads != usual) or (found and not slide and heads != found[0]):
            raise table.problem(name, "does not give all layers of one type the same heads and nothing else")
        if not slide:
            found.append(heads)
    if table.unread():
        raise table.problem(table.unread()[0], "is no layer")
    return found[0]


class DenseWidths(Field):
    """`use_double_wide_mlp`: layers with the keys of others have twice the width. It must follow `HeadsOfLayers`."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the width of each layer."""
        width, shared, count = settings["d_ff"], settings["shared_kv_layers"], settings["num_layers"]
        if not given.typed("use_double_wide_mlp", bool, False) or not 0 < shared <= count:
            return {}
        return {"layer_d_ff": (width,) * (count - shared) + (2 * width,) * shared}

    def write(self, config: ModelConfig) -> Settings:
        """Returns whether layers have widths of their own."""
        return {"use_double_wide_mlp": config.layer_d_ff is not None}


class ExpertsBeside(Field):
    """Experts beside the dense network, which is as wide as several of them. This field must follow the widths."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the settings of the experts, whose shared experts are the dense network; none if there are none."""
        enabled = given.typed("enable_moe_block", bool, False)
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        count, per_token, width = (given.typed(name, int, None, optional=True) for name in names)
        if not enabled:
            return {}
        if not count or not per_token or not width:
            raise given.problem("enable_moe_block", f"needs {', '.join(names)}")
        if settings["d_ff"] % width or settings.get("layer_d_ff") is not None:
            raise given.problem(
                "moe_intermediate_size", "is not the width of an expert of which the dense network has a whole number"
            )
        found: dict[str, Any] = {
            **_OF_EXPERTS, "count": count, "per_token": per_token, "d_ff": width, "shared": settings["d_ff"] // width,
            "router_scale": max(1, settings["d_model"]) ** -0.5,
        }  # fmt: skip
        return {f"experts.{name}": value for name, value in found.items()}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the keys of the experts."""
        experts = config.experts
        if experts is None or not is_close(experts.router_scale, config.d_model**-0.5):
            return {"enable_moe_block": False}
        width = experts.d_ff or config.ffn_size
        return {
            "enable_moe_block": True, "num_experts": experts.count, "top_k_experts": experts.per_token,
            "moe_intermediate_size": width, "intermediate_size": width * experts.shared,
        }  # fmt: skip


_OF_EXPERTS = {
    "own_norms": True, "expert_scales": True, "load_balancing_loss": 0.0, "router_z_loss": 0.0
}  # fmt: skip


class LayerInputs(Field):
    """The width of the inputs of layers, and the rows of their table, which must be those of the vocabulary."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the width; 0 or null is none."""
        width = given.typed("hidden_size_per_layer_input", int, 256, optional=True)
        rows = given.typed("vocab_size_per_layer_input", int, 262144)
        if not width:
            return {}
        if rows != settings["vocab_size"]:
            raise given.problem("vocab_size_per_layer_input", f"differs from vocab_size = {settings['vocab_size']}")
        return {"layer_inputs.width": width}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the width."""
        width = 0 if config.layer_inputs is None else config.layer_inputs.width
        return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": config.vocabulary}


GEMMA4 = family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (
        *llama.EMBEDDING,
        TensorRule(("layer_inputs.embedding.weight",), "model.embed_tokens_per_layer.weight"),
        *same("layer_inputs.projection", "model.per_layer_model_projection"),
        *same("layer_inputs.norm", "model.per_layer_projection_norm"),
        TensorRule((f"{BLOCK}.factor",), f"{LAYER}.layer_scalar"),
        *NORMS, *llama.ATTENTION, *llama.FEED_FORWARD,
        *under(f"{EXPERTS}.shared", f"{LAYER}.mlp", "gate_proj", "up_proj", "down_proj"),
        *router(f"{LAYER}.router.proj"),
        TensorRule((f"{EXPERTS}.router.expert_scale",), f"{LAYER}.router.per_expert_scale"),
        TensorRule((f"{EXPERTS}.router_norm.weight",), f"{LAYER}.router.scale"),
        *under(
            EXPERTS, LAYER,
            shared_norm="pre_feedforward_layernorm", shared_output_norm="post_feedforward_layernorm_1",
            routed_norm="pre_feedforward_layernorm_2", routed_output_norm="post_feedforward_layernorm_2",
        ),
        TensorRule(
            (f"{EXPERTS}.experts.gate_proj", f"{EXPERTS}.experts.up_proj"), f"{LAYER}.experts.gate_up_proj",
            JOINED_EXPERTS,
        ),
        TensorRule((f"{EXPERTS}.experts.down_proj",), f"{LAYER}.experts.down_proj"),
        *under(
            f"{BLOCK}.layer_input", LAYER,
            gate_proj="per_layer_input_gate", o_proj="per_layer_projection", norm="post_per_layer_input_norm",
        ),
        *llama.HEAD,
    ),
    *implied(
        position_encoding="rope", norm="rmsnorm", norm_position="sandwich", bias=False, qk_norm="head",
        value_norm=True, layer_factor=True, attention_scale=1.0,
    ),
    *without(
        llama.llama_keys(
            262144, 131072, d_ff=9216, d_model=2304, num_layers=30, num_heads=8, num_kv_heads=4, tied=True,
            activation=Activation("hidden_activation", TANH, "gelu_pytorch_tanh"),
        ),
        "num_key_value_heads",
    ),
    EmbeddingRoot(),
    llama.ATTENTION_BIAS,
    llama.ATTENTION_DROPOUT,
    number("final_logit_softcapping", "logit_soft_cap", None, optional=True),
    # Pictures see all of their tokens, text does not.
    fixed("use_bidirectional_attention", None, "vision"),
    windows_by_period(512, 6, ends_without=True),
    HeadsOfLayers(),
    DenseWidths(),
    ExpertsBeside(),
    LayerInputs(),
    LayerRopeParameters(
        sliding_key=None,
        scalings=("proportional",),
        missing={"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ),
)  # fmt: skip
