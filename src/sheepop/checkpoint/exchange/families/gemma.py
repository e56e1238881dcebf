"""Gemma: norms that scale by 1 + weight, scaled embeddings; Gemma 2 and 3 (text) have norms around every sublayer."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    BLOCK,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    LAYER,
    TENSORS,
    llama_keys,
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
    score_scale,
    size,
    switch,
    unread,
)
from sheepop.model.config import ModelConfig

_NORM = implied(position_encoding="rope", norm="rmsnorm_zero_centered", bias=False)
# In this family the name of the exact function means the approximation.
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS, "gelu": "geglu_tanh"}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=(
        *_NORM,
        *implied(norm_position="pre"),
        *llama_keys(
            256000, 8192, d_ff=24576, d_model=3072, num_layers=28, num_heads=16, num_kv_heads=16, tied=True,
            activation=Activation("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh"),
        ),
        size("head_dim", "head_dim", 256),
        EmbeddingRoot(),
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        RopeParameters(),
        fixed("use_bidirectional_attention", None, False),
    ),
    tensors=TENSORS,
)  # fmt: skip


class ScoreDivisor(Field):
    """`query_pre_attn_scalar`, an integer; scores are divided by its root (Gemma)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns one over the root as the scale."""
        divisor = given.typed("query_pre_attn_scalar", int, 256)
        if divisor < 1:
            raise given.problem("query_pre_attn_scalar", "is not positive")
        return {"attention_scale": divisor**-0.5}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the nearest integer."""
        return {"query_pre_attn_scalar": max(1, round(min(1 / score_scale(config), 2.0**15) ** 2))}


_GEMMA_FIELDS: tuple[Field, ...] = (
    *_NORM,
    *implied(norm_position="sandwich"),
    size("hidden_size", "d_model", 2304),
    count("num_hidden_layers", "num_layers", 26),
    size("num_attention_heads", "num_heads", 8),
    size("intermediate_size", "d_ff", 9216),
    size("num_key_value_heads", "num_kv_heads", 4, optional=True),
    size("head_dim", "head_dim", 256),
    Activation("hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}, "gelu_pytorch_tanh"),
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
GEMMA_NORMS = (
    *same(f"{BLOCK}.attention_norm", f"{LAYER}.input_layernorm"),
    *same(f"{BLOCK}.attention_output_norm", f"{LAYER}.post_attention_layernorm"),
    *same(f"{BLOCK}.feed_forward_norm", f"{LAYER}.pre_feedforward_layernorm"),
    *same(f"{BLOCK}.feed_forward_output_norm", f"{LAYER}.post_feedforward_layernorm"),
)
_GEMMA_TENSORS = (*EMBEDDING, *GEMMA_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        size("vocab_size", "vocab_size", 256000),
        context("max_position_embeddings", 8192),
        *_GEMMA_FIELDS,
        number("attn_logit_softcapping", "attention_soft_cap", 50.0, optional=True),
        number("final_logit_softcapping", "logit_soft_cap", 30.0, optional=True),
        windows_by_period(4096, 2),
        RopeParameters(),
    ),
    tensors=_GEMMA_TENSORS,
    whole_heads=True,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *implied(qk_norm="head"),
        size("vocab_size", "vocab_size", 262208),
        context("max_position_embeddings", 131072),
        *_GEMMA_FIELDS,
        Fixed("attn_logit_softcapping", (None,), "and transformers ignores this key in this family"),
        number("final_logit_softcapping", "logit_soft_cap", None, optional=True),
        windows_by_period(4096, 6, "sliding_window_pattern"),
        LayerRopeParameters(),
        # An older form of the pattern, which `layer_types` replaced.
        unread("_sliding_window_pattern"),
    ),
    tensors=_GEMMA_TENSORS,
    whole_heads=True,
)
