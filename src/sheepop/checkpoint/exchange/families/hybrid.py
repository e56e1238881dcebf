"""Families in which some layers have something else instead of attention: LFM 2, Qwen3-Next, Qwen 3.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sheepop.checkpoint.exchange.families.deepseek import DenseLayers
from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD_DIM,
    LAYER,
    PRE_NORMS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SparseLayers,
    llama_keys,
    qwen_experts,
    shared_expert,
)
from sheepop.checkpoint.exchange.families.llama import HEAD as LLAMA_HEAD
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import (
    BLOCK,
    BY_KEY_HEAD,
    EXPERTS,
    INTERLEAVED,
    TAPS,
    TensorRule,
    experts,
    fused,
    same,
    under,
)
from sheepop.checkpoint.given import LARGEST_COUNT, Given
from sheepop.checkpoint.mapping import (
    Field,
    Settings,
    Value,
    all_but_every,
    context,
    count,
    fixed,
    implied,
    number,
    size,
    switch,
    unread,
    without,
)
from sheepop.model.config import ModelConfig
from sheepop.model.options import Mixer

_ATTENTION = "full_attention"
_MIXER = f"{BLOCK}.mixer"


@dataclass(frozen=True)
class MixerLayers(Field):
    """The layers without attention: those of the type `kind` in `layer_types`, or without that key by `rule`.

    The rule maps the keys and the number of layers to a boolean for each layer. This field must follow the other
    settings of the section `mixer`, and removes it if no layer has it.
    """

    mixer: Mixer
    kind: str
    rule: Callable[[Given, int], list[bool]]

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the layers."""
        num_layers = settings["num_layers"]
        mixes, kinds = self.rule(given, num_layers), given.take("layer_types", None)
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                raise given.problem("layer_types", f"is not a list of {num_layers} entries, one for each layer")
            if unknown := [kind for kind in kinds if kind not in (self.kind, _ATTENTION)]:
                raise given.problem(
                    "layer_types", f"has the type {unknown[0]!r}; SheepOp supports {_ATTENTION} and {self.kind}"
                )
            mixes = [kind == self.kind for kind in kinds]
        layers = tuple(layer for layer, mixer in enumerate(mixes) if mixer)
        return {f"{self.mixer}.layers": layers} if layers else {self.mixer: None}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the type of each layer."""
        mixers = (config.mixer(layer) for layer in range(config.num_layers))
        return {"layer_types": [self.kind if mixer == self.mixer else _ATTENTION for mixer in mixers]}


def _but_listed(given: Given, num_layers: int) -> list[bool]:
    """All layers but those in `full_attn_idxs`, or without that key none (LFM 2)."""
    if given.take("full_attn_idxs", None) is None:
        return [False] * num_layers
    attends = given.entries("full_attn_idxs", int)
    return [layer not in attends for layer in range(num_layers)]


def _but_every(given: Given, num_layers: int) -> list[bool]:
    """All layers but every `full_attention_interval`-th (Qwen)."""
    period = given.typed("full_attention_interval", int, 4, largest=LARGEST_COUNT)
    if period < 1:
        raise given.problem("full_attention_interval", "is not a number of layers")
    return all_but_every(period, num_layers)


class AdjustedWidth(Field):
    """The width of the feed-forward network, which may be that of an ungated one (LFM 2)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns two thirds of the width, times a factor and rounded up to a multiple, if the file says so."""
        width = given.typed("intermediate_size", int, 12288, "block_ff_dim")
        factor = given.typed("block_ffn_dim_multiplier", float, 1.0, optional=True)
        unit = given.typed("block_multiple_of", int, 256)
        if given.typed("block_auto_adjust_ff_dim", bool, True):
            if unit < 1:
                raise given.problem("block_multiple_of", "is not a width")
            width = int(2 * width / 3)
            if factor is not None:
                width = -(-int(factor * width) // unit) * unit
        return {"d_ff": width}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the width as it is."""
        return {"intermediate_size": config.ffn_size, "block_auto_adjust_ff_dim": False}


def _lfm_keys(d_model: int, width: Field) -> tuple[Field, ...]:
    return (
        *implied(
            position_encoding="rope", norm="rmsnorm", norm_position="pre", bias=False, dropout=0.0, qk_norm="head",
            activation="swiglu",
        ),
        size("vocab_size", "vocab_size", 65536),
        size("hidden_size", "d_model", d_model),
        count("num_hidden_layers", "num_layers", 32),
        size("num_attention_heads", "num_heads", 32),
        size("num_key_value_heads", "num_kv_heads", 8),
        HEAD_DIM,
        context("max_position_embeddings", 128_000),
        width,
        number("norm_eps", "norm_eps", 1e-5),
        Value("tie_word_embeddings", ("tie_weights",), bool, True, ("tie_embedding",)),
        RopeParameters(base=1_000_000.0),
        size("conv_L_cache", "gated_convolution.width", 3),
        switch("conv_bias", "gated_convolution.bias", default=False),
        MixerLayers("gated_convolution", "conv", _but_listed),
    )  # fmt: skip


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fields=_lfm_keys(2560, AdjustedWidth()),
    tensors=(
        *EMBEDDING,
        *under(BLOCK, LAYER, attention_norm="operator_norm", feed_forward_norm="ffn_norm"),
        *under(
            f"{BLOCK}.attention", f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", o_proj="out_proj",
            q_norm="q_layernorm", k_norm="k_layernorm",
        ),
        TensorRule((f"{_MIXER}.convolution.taps",), f"{LAYER}.conv.conv.weight", TAPS),
        TensorRule((f"{_MIXER}.convolution.bias",), f"{LAYER}.conv.conv.bias"),
        *under(_MIXER, f"{LAYER}.conv", "in_proj", o_proj="out_proj"),
        *under(f"{BLOCK}.feed_forward", f"{LAYER}.feed_forward", gate_proj="w1", up_proj="w3", down_proj="w2"),
        *same("final_norm", "model.embedding_norm"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
    ),
)  # fmt: skip


_LFM_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    fields=(
        *_lfm_keys(2048, size("intermediate_size", "d_ff", 7168)),
        *implied(**{"experts.scores": "sigmoid", "experts.load_balancing_loss": 0.0, "experts.router_z_loss": 0.0}),
        count("num_experts", "experts.count", 32),
        size("num_experts_per_tok", "experts.per_token", 4),
        size("moe_intermediate_size", "experts.d_ff", 1792),
        switch("norm_topk_prob", "experts.normalize", default=True),
        number("routed_scaling_factor", "experts.scale", 1.0),
        fixed("use_expert_bias", True),
        unread("output_router_logits"),
        DenseLayers(2, key="num_dense_layers"),
    ),
    tensors=(
        *LFM2.tensors,
        *experts(f"{LAYER}.feed_forward", _LFM_EXPERTS),
        TensorRule((f"{EXPERTS}.router.balance",), f"{LAYER}.feed_forward.expert_bias"),
    ),
)


def _qwen_keys(max_seq_len: int, for_images: tuple[str, ...] = (), **sizes: Any) -> tuple[Field, ...]:
    return (
        *implied(
            position_encoding="rope", norm="rmsnorm_zero_centered", norm_position="pre", bias=False, qk_norm="head",
            attention_output_gate=True, activation="swiglu",
        ),
        # SiLU is the activation of the convolutions too.
        *without(llama_keys(max_seq_len=max_seq_len, **sizes), "hidden_act"),
        fixed("hidden_act", "silu"),
        size("head_dim", "head_dim", 256),
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        RopeParameters(fraction=0.25, for_images=for_images),
        size("linear_conv_kernel_dim", "gated_delta_net.width", 4),
        size("linear_num_key_heads", "gated_delta_net.num_key_heads", 16),
        size("linear_num_value_heads", "gated_delta_net.num_value_heads", 32),
        size("linear_key_head_dim", "gated_delta_net.key_head_dim", 128),
        size("linear_value_head_dim", "gated_delta_net.value_head_dim", 128),
        MixerLayers("gated_delta_net", "linear_attention", _but_every),
    )  # fmt: skip


_DELTA = f"{LAYER}.linear_attn"
_GATED_ATTENTION = (
    *fused((f"{BLOCK}.attention.q_proj", f"{BLOCK}.attention.gate_proj"), f"{LAYER}.self_attn.q_proj", INTERLEAVED),
    *(rule for rule in ATTENTION if ".q_proj" not in rule.theirs),
)
_QWEN_TENSORS = (
    *EMBEDDING,
    *PRE_NORMS,
    *_GATED_ATTENTION,
    *(
        TensorRule((f"{_MIXER}.{ours}",), f"{_DELTA}.{theirs}")
        for ours, theirs in (
            ("decay", "A_log"), ("decay_bias", "dt_bias"), ("norm.weight", "norm.weight"),
            ("o_proj.weight", "out_proj.weight"),
        )
    ),
    TensorRule(tuple(f"{_MIXER}.convolutions.{name}.taps" for name in "qkv"), f"{_DELTA}.conv1d.weight", TAPS),
    *FEED_FORWARD,
    *LLAMA_HEAD,
)  # fmt: skip


def _projections(*names: str) -> tuple[str, ...]:
    return tuple(f"{_MIXER}.{name}_proj.weight" for name in names)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=(
        *_qwen_keys(
            32768, vocab_size=151936, d_ff=5632, d_model=2048, num_layers=48, num_heads=16, num_kv_heads=2,
        ),
        *qwen_experts(512, 10, 512),
        switch("norm_topk_prob", "experts.normalize", default=True),
        shared_expert(512),
        SparseLayers(),
    ),
    tensors=(
        *_QWEN_TENSORS,
        *QWEN_EXPERTS,
        *SHARED_EXPERT,
        TensorRule(_projections("q", "k", "v", "gate"), f"{_DELTA}.in_proj_qkvz.weight", BY_KEY_HEAD),
        TensorRule(_projections("beta", "decay"), f"{_DELTA}.in_proj_ba.weight", BY_KEY_HEAD),
    ),
    unused=("mtp.",),
)  # fmt: skip

_APART = (
    TensorRule(_projections("q", "k", "v"), f"{_DELTA}.in_proj_qkv.weight"),
    *(
        TensorRule(_projections(ours), f"{_DELTA}.in_proj_{theirs}.weight")
        for ours, theirs in (("gate", "z"), ("beta", "b"), ("decay", "a"))
    ),
)
# With text alone the three positions of a token are equal, so that it does not matter which pairs use which.
FOR_IMAGES = ("mrope_section", "mrope_interleaved")

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=_qwen_keys(32768, FOR_IMAGES, vocab_size=248320, d_ff=12288, num_heads=16, num_kv_heads=4),
    tensors=(*_QWEN_TENSORS, *_APART),
    unused=("mtp.",),
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=(
        *without(
            _qwen_keys(
                32768, FOR_IMAGES, vocab_size=248320, d_ff=1, d_model=2048, num_layers=40, num_heads=16, num_kv_heads=2
            ),
            "intermediate_size",
        ),
        *implied(d_ff=None, **{"experts.normalize": True}),
        *qwen_experts(256, 8, 512),
        shared_expert(512),
    ),
    tensors=(*_QWEN_TENSORS, *_APART, *QWEN_EXPERTS, *SHARED_EXPERT),
    unused=("mtp.",),
)
