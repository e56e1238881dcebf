"""Gemma 2 and 3 (text): norms before and after every sublayer, which scale by 1 + weight, and scaled embeddings."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import GATED_ACTIVATIONS, Activation, windows_by_period
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import same
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    EmbeddingRoot,
    Field,
    Fixed,
    Settings,
    context,
    count,
    fixed,
    implied,
    number,
    optional_number,
    optional_size,
    score_scale,
    size,
    switch,
    unread,
)
from sheepop.model.config import ModelConfig

_LARGEST_ROOT = 2.0**15


class ScoreDivisor(Field):
    """`query_pre_attn_scalar`, an integer; scores are divided by its root (Gemma)."""

    keys = ("query_pre_attn_scalar",)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns one over the root as the scale."""
        divisor = given.typed("query_pre_attn_scalar", int, 256)
        if divisor < 1:
            raise given.problem("query_pre_attn_scalar", "is not positive")
        return {"attention_scale": divisor**-0.5}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the nearest integer."""
        return {"query_pre_attn_scalar": max(1, round(min(1 / score_scale(config), _LARGEST_ROOT) ** 2))}


_GATED = {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}
_FIELDS: tuple[Field, ...] = (
    *implied(position_encoding="rope", norm="rmsnorm_zero_centered", norm_position="sandwich", bias=False),
    size("hidden_size", "d_model", 2304),
    count("num_hidden_layers", "num_layers", 26),
    size("num_attention_heads", "num_heads", 8),
    size("intermediate_size", "d_ff", 9216),
    optional_size("num_key_value_heads", "num_kv_heads", 4),
    size("head_dim", "head_dim", 256),
    Activation("hidden_activation", _GATED, "gelu_pytorch_tanh"),
    number("rms_norm_eps", "norm_eps", 1e-6),
    switch("tie_word_embeddings", "tie_weights", default=True),
    ATTENTION_BIAS,
    EmbeddingRoot(),
    ScoreDivisor(),
    ATTENTION_DROPOUT,
    fixed("use_bidirectional_attention", False, None),
    # transformers reads `hidden_activation` and `sliding_window` instead of these.
    unread("hidden_act", "sliding_window_size"),
)
_NORMS = (
    *same("blocks.{layer}.attention_norm", "model.layers.{layer}.input_layernorm"),
    *same("blocks.{layer}.attention_output_norm", "model.layers.{layer}.post_attention_layernorm"),
    *same("blocks.{layer}.feed_forward_norm", "model.layers.{layer}.pre_feedforward_layernorm"),
    *same("blocks.{layer}.feed_forward_output_norm", "model.layers.{layer}.post_feedforward_layernorm"),
)
_TENSORS = (*EMBEDDING, *_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        size("vocab_size", "vocab_size", 256000),
        context("max_position_embeddings", 8192),
        *_FIELDS,
        optional_number("attn_logit_softcapping", "attention_soft_cap", 50.0),
        optional_number("final_logit_softcapping", "logit_soft_cap", 30.0),
        windows_by_period(4096, 2),
        RopeParameters(),
    ),
    tensors=_TENSORS,
    whole_heads=True,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *implied(qk_norm="head"),
        size("vocab_size", "vocab_size", 262208),
        context("max_position_embeddings", 131072),
        *_FIELDS,
        Fixed("attn_logit_softcapping", (None,), "and transformers ignores this key in this family"),
        optional_number("final_logit_softcapping", "logit_soft_cap", None),
        windows_by_period(4096, 6, "sliding_window_pattern"),
        LayerRopeParameters(),
        # An older form of the pattern, which `layer_types` replaced.
        unread("_sliding_window_pattern"),
    ),
    tensors=_TENSORS,
    whole_heads=True,
)
