"""Families that change Llama in one or two points: SmolLM 3, Granite, EXAONE 4, GLM 4, Seed-OSS, Arcee, Ernie 4.5."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    BLOCK,
    EMBEDDING,
    FEED_FORWARD,
    FUSED_FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    IMPLIED,
    LAYER,
    OUTPUT_NORMS,
    PAIRED_ATTENTION,
    PRE_NORMS,
    TENSORS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Dropouts, LayerTypes
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import same
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Field,
    OutputScale,
    Settings,
    all_but_every,
    implied,
    number,
    score_scale,
    size,
    switch,
    unread,
)
from sheepop.model.config import ModelConfig

_MLP_BIAS = switch("mlp_bias", "feed_forward_bias", default=False)


class ScoreFactor(Field):
    """`attention_multiplier`, by which scores are multiplied (Granite)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the factor."""
        return {"attention_scale": given.typed("attention_multiplier", float, 1.0)}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the factor, also if it is the usual one."""
        return {"attention_multiplier": score_scale(config)}


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=2048, d_ff=11008),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        _MLP_BIAS,
        number("embedding_multiplier", "embedding_scale", 1.0),
        number("residual_multiplier", "residual_scale", 1.0),
        ScoreFactor(),
        OutputScale("logits_scaling", 1.0, divides=True),
        RopeParameters(),
    ),
    tensors=TENSORS,
)


def _rotating(given: Given, num_layers: int) -> list[bool]:
    """Returns for each layer whether it rotates: `no_rope_layers` is 1 where it does (SmolLM 3)."""
    period = given.typed("no_rope_layer_interval", int, 4)
    if given.take("no_rope_layers", None) is None:
        if period < 1:
            raise given.problem("no_rope_layer_interval", "is not a number of layers")
        return all_but_every(period, num_layers)
    found = given.entries("no_rope_layers", int)
    if len(found) < num_layers:
        raise given.problem("no_rope_layers", f"has {len(found)} entries for {num_layers} layers")
    return [bool(entry) for entry in found[:num_layers]]


class RotatingLayers(LayerTypes):
    """Windows that may be in the layers without rotation (SmolLM 3)."""

    def write(self, config: ModelConfig) -> Settings:
        """Returns the windows, and a number for each layer: 1 if it rotates."""
        rotating = [int(config.rotates(layer)) for layer in range(config.num_layers)]
        return {**super().write(config), "no_rope_layers": rotating}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(128256, 32768, d_ff=11008, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=4, tied=True),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        _MLP_BIAS,
        RotatingLayers(
            None,
            lambda given, num_layers: [not rotates for rotates in _rotating(given, num_layers)],
            "use_sliding_window",
            lambda given, window, slides: _rotating(given, len(slides)),
        ),
        RopeParameters(base=2_000_000.0),
        # Of the published files; no version reads it in this family.
        unread("max_window_layers"),
    ),
    tensors=TENSORS,
)


def _exaone_windows(given: Given, num_layers: int) -> list[bool]:
    if given.take("sliding_window", 4096) is None or given.take("layer_types", None) is not None:
        given.take("sliding_window_pattern", None)
        return [False] * num_layers
    period = given.typed("sliding_window_pattern", int, 4)
    if period < 1:
        raise given.problem("sliding_window_pattern", "is not a number of layers")
    return all_but_every(period, num_layers)


class RotatingWindows(LayerTypes):
    """With a window in some layers, only these rotate, otherwise all (EXAONE 4)."""

    def write(self, config: ModelConfig) -> Settings:
        """Returns the windows; null if there are none, since then all layers rotate."""
        return {**super().write(config), "sliding_window": config.sliding_window}


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    fields=(
        *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="head", bias=False),
        *llama_keys(102400, 2048, d_ff=16384, num_kv_heads=32, norm_eps=1e-5),
        HEAD_DIM,
        ATTENTION_DROPOUT,
        RotatingWindows(
            4096,
            _exaone_windows,
            rotation=lambda given, window, slides: slides if window is not None else [True] * len(slides),
        ),
        RopeParameters(),
    ),
    tensors=(*EMBEDDING, *OUTPUT_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD),
)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *implied(position_encoding="rope", norm="rmsnorm", norm_position="sandwich", bias=False),
        *llama_keys(151552, 131072, d_ff=13696, num_layers=40, num_kv_heads=2, norm_eps=1.5625e-07),
        size("head_dim", "head_dim", 128),
        switch("attention_bias", "attention_bias", default=True),
        ATTENTION_DROPOUT,
        RopeParameters(fraction=0.5),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *same(f"{BLOCK}.attention_output_norm", f"{LAYER}.post_self_attn_layernorm"),
        *same(f"{BLOCK}.feed_forward_output_norm", f"{LAYER}.post_mlp_layernorm"),
        *PAIRED_ATTENTION,
        *FUSED_FEED_FORWARD,
        *HEAD,
    ),
)

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(155136, 524288, d_ff=27648, num_layers=64, num_heads=80, num_kv_heads=8),
        size("head_dim", "head_dim", 128, optional=True),
        switch("attention_bias", "attention_bias", default=True),
        switch("attention_out_bias", "attention_output_bias", default=False),
        _MLP_BIAS,
        Dropouts(None, "attention_dropout", "residual_dropout", default=0.1),
        RopeParameters(),
        unread("pretraining_tp"),
    ),
    tensors=TENSORS,
)

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(
            32000, 4096, d_ff=18432, d_model=2560, norm_eps=1e-5,
            activation=Activation("hidden_act", PLAIN_ACTIVATIONS, "relu2"),
        ),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        _MLP_BIAS,
        RopeParameters(),
    ),
    tensors=TENSORS,
    whole_heads=True,
)  # fmt: skip

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=(
        *IMPLIED,
        *implied(dropout=0.0),
        *llama_keys(
            103424, 131072, d_ff=3072, d_model=1024, num_layers=18, num_heads=16, num_kv_heads=2, norm_eps=1e-5,
            tied=True,
        ),
        size("head_dim", "head_dim", 128, optional=True),
        switch("use_bias", "attention_bias", "attention_output_bias", "feed_forward_bias", default=False),
        RopeParameters(base=500_000.0),
    ),
    tensors=(*EMBEDDING, *PRE_NORMS, *PAIRED_ATTENTION, *FEED_FORWARD, *HEAD),
)  # fmt: skip
