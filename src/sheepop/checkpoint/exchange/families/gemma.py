"""Gemma: norms that scale by 1 + weight, scaled embeddings; Gemma 2 and 3 (text) have norms around every sublayer."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families import llama
from sheepop.checkpoint.exchange.families.llama import ATTENTION_BIAS, ATTENTION_DROPOUT, LAYER
from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.fields import GATED_ACTIVATIONS, Activation, windows_by_period
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import BLOCK, under
from sheepop.checkpoint.mapping import (
    Converted,
    EmbeddingRoot,
    Field,
    Fixed,
    Settings,
    fixed,
    implied,
    number,
    score_scale,
    size,
    unread,
)
from sheepop.model.config import ModelConfig

_IMPLIED = implied(position_encoding="rope", norm="rmsnorm_zero_centered", bias=False)
TANH = {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}
_HEAD_DIM = size("head_dim", "head_dim", 256)
_FIELDS = (ATTENTION_BIAS, ATTENTION_DROPOUT, EmbeddingRoot())

GEMMA = family(
    "gemma",
    "GemmaForCausalLM",
    llama.TENSORS,
    *_IMPLIED,
    *implied(norm_position="pre"),
    *llama.llama_keys(
        256000, 8192, d_ff=24576, d_model=3072, num_layers=28, num_heads=16, num_kv_heads=16, tied=True,
        # In this family the name of the exact function means the approximation.
        activation=Activation("hidden_act", {**TANH, "gelu": "geglu_tanh"}, "gelu_pytorch_tanh"),
    ),
    _HEAD_DIM,
    *_FIELDS,
    RopeParameters(),
    fixed("use_bidirectional_attention", None, False),
)  # fmt: skip


def _over_root(divisor: int, _: Settings) -> Settings:
    if divisor < 1:
        raise ValueError("is not positive")
    return {"attention_scale": divisor**-0.5}


def _nearest_divisor(config: ModelConfig) -> int:
    return max(1, round(min(1 / score_scale(config), 2.0**15) ** 2))


def _gemma_fields(vocab_size: int, max_seq_len: int) -> tuple[Field, ...]:
    """Returns the fields that Gemma 2 and 3 share."""
    return (
        *_IMPLIED,
        *implied(norm_position="sandwich"),
        *llama.llama_keys(
            vocab_size, max_seq_len, d_ff=9216, d_model=2304, num_layers=26, num_heads=8, num_kv_heads=4, tied=True,
            activation=Activation("hidden_activation", TANH, "gelu_pytorch_tanh"),
        ),
        _HEAD_DIM,
        *_FIELDS,
        # Scores are divided by its root.
        Converted("query_pre_attn_scalar", int, 256, _over_root, _nearest_divisor),
        fixed("use_bidirectional_attention", False, None),
        # transformers reads `hidden_activation` and `sliding_window` instead of these.
        unread("hidden_act", "sliding_window_size"),
    )  # fmt: skip


NORMS = (
    *under(BLOCK, LAYER, attention_norm="input_layernorm", feed_forward_norm="pre_feedforward_layernorm"),
    *llama.OUTPUT_NORMS,
)
_GEMMA_TENSORS = (*llama.EMBEDDING, *NORMS, *llama.ATTENTION, *llama.FEED_FORWARD, *llama.HEAD)

GEMMA2 = family(
    "gemma2",
    "Gemma2ForCausalLM",
    _GEMMA_TENSORS,
    *_gemma_fields(256000, 8192),
    number("attn_logit_softcapping", "attention_soft_cap", 50.0, optional=True),
    number("final_logit_softcapping", "logit_soft_cap", 30.0, optional=True),
    windows_by_period(4096, 2),
    RopeParameters(),
    whole_heads=True,
)

GEMMA3 = family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA_TENSORS,
    *implied(qk_norm="head"),
    *_gemma_fields(262208, 131072),
    Fixed("attn_logit_softcapping", (None,), "and transformers ignores this key in this family"),
    number("final_logit_softcapping", "logit_soft_cap", None, optional=True),
    windows_by_period(4096, 6, "sliding_window_pattern"),
    LayerRopeParameters(),
    # An older form of the pattern, which `layer_types` replaced.
    unread("_sliding_window_pattern"),
    whole_heads=True,
)
