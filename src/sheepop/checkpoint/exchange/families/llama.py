"""Llama 2 and 3, SmolLM, TinyLlama and other models stored as Llama; and the tables that its descendants share."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import GATED_ACTIVATIONS, Activation, Dropouts
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import TensorRule, same
from sheepop.checkpoint.mapping import (
    Field,
    context,
    count,
    fixed,
    implied,
    number,
    optional_size,
    size,
    switch,
    unread,
)

IMPLIED = implied(position_encoding="rope", norm="rmsnorm", norm_position="pre", bias=False)


def llama_keys(
    vocab_size: int,
    max_seq_len: int,
    *,
    d_ff: int,
    d_model: int = 4096,
    num_layers: int = 32,
    num_kv_heads: int | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Field, ...]:
    """Returns the keys that all descendants of Llama share, except head and position keys, with these defaults."""
    return (
        size("vocab_size", "vocab_size", vocab_size),
        size("hidden_size", "d_model", d_model),
        count("num_hidden_layers", "num_layers", num_layers),
        size("num_attention_heads", "num_heads", 32),
        optional_size("num_key_value_heads", "num_kv_heads", num_kv_heads),
        context("max_position_embeddings", max_seq_len),
        size("intermediate_size", "d_ff", d_ff),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", norm_eps),
        switch("tie_word_embeddings", "tie_weights", default=False),
    )


HEAD_DIM = optional_size("head_dim", "head_dim", None)
ATTENTION_BIAS = switch("attention_bias", "attention_bias", "attention_output_bias", default=False)
ATTENTION_DROPOUT = Dropouts(None, "attention_dropout", None)

EMBEDDING = (TensorRule(("embedding.weight",), "model.embed_tokens.weight"),)
HEAD = (*same("final_norm", "model.norm"), TensorRule(("lm_head.weight",), "lm_head.weight"))
PRE_NORMS = (
    *same("blocks.{layer}.attention_norm", "model.layers.{layer}.input_layernorm"),
    *same("blocks.{layer}.feed_forward_norm", "model.layers.{layer}.post_attention_layernorm"),
)
ATTENTION = tuple(
    rule
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    for rule in same(f"blocks.{{layer}}.attention.{name}", f"model.layers.{{layer}}.self_attn.{name}")
)
FEED_FORWARD = tuple(
    rule
    for name in ("gate_proj", "up_proj", "down_proj")
    for rule in same(f"blocks.{{layer}}.feed_forward.{name}", f"model.layers.{{layer}}.mlp.{name}")
)
TENSORS = (*EMBEDDING, *PRE_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=2048, d_ff=11008),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        switch("mlp_bias", "feed_forward_bias", default=False),
        RopeParameters(),
        # Parallelism of the training program, a marker of SmolLM2, and lengths that other programs added.
        unread(
            "pretraining_tp",
            "is_llama_config",
            "max_sequence_length",
            "model_max_length",
            "tokenizer_model_max_length",
            "tokenizer_padding_side",
        ),
        fixed("rope_interleaved", False),
    ),
    tensors=TENSORS,
    whole_heads=True,
)
