"""Qwen 2 (biases of queries, keys and values), Qwen 3 (normalised queries and keys) and its mixture of experts."""

from __future__ import annotations

from sheepop.checkpoint.exchange.expert_layers import SparseLayers
from sheepop.checkpoint.exchange.families.llama import IMPLIED, TENSORS, sizes
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
    Field,
    context,
    count,
    fixed,
    number,
    optional_size,
    size,
    switch,
    unread,
)
from sheepop.checkpoint.exchange.rotary import Rotary
from sheepop.checkpoint.exchange.tensor_rules import experts
from sheepop.checkpoint.exchange.windows import LayerWindows, Window, after_first_layers

_CHOICES: tuple[Field, ...] = (
    Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
    number("rms_norm_eps", "norm_eps", 1e-6),
    switch("tie_word_embeddings", "tie_weights", default=False),
    Dropouts(None, "attention_dropout", None),
    Rotary(),
)
_WINDOWS = LayerWindows(
    default=4096, rule=after_first_layers(28), rule_keys=("max_window_layers",), switched_by="use_sliding_window"
)
_PLACE = "model.layers.{layer}.mlp"

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    implied={**IMPLIED, "attention_bias": True},
    fields=(
        *sizes(vocab_size=151936, max_seq_len=32768),
        size("intermediate_size", "d_ff", 22016),
        optional_size("num_key_value_heads", "num_kv_heads", 32),
        optional_size("head_dim", "head_dim", None),
        fixed("use_mrope", False),
        _WINDOWS,
        *_CHOICES,
    ),
    tensors=TENSORS,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    implied={**IMPLIED, "qk_norm": "head"},
    fields=(
        *sizes(vocab_size=151936, max_seq_len=32768),
        size("intermediate_size", "d_ff", 22016),
        optional_size("num_key_value_heads", "num_kv_heads", 32),
        size("head_dim", "head_dim", 128),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=False),
        _WINDOWS,
        *_CHOICES,
    ),
    tensors=TENSORS,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    implied={**IMPLIED, "qk_norm": "head", "experts": {"scores": "softmax", "router_z_loss": 0.0}},
    fields=(
        size("vocab_size", "vocab_size", 151936),
        size("hidden_size", "d_model", 2048),
        count("num_hidden_layers", "num_layers", 24),
        size("num_attention_heads", "num_heads", 32),
        context("max_position_embeddings", 32768),
        size("intermediate_size", "d_ff", 6144),
        optional_size("num_key_value_heads", "num_kv_heads", 4),
        optional_size("head_dim", "head_dim", None),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=False),
        Window(default=4096, switched_by="use_sliding_window"),
        count("num_experts", "experts.count", 128, "num_local_experts"),
        size("num_experts_per_tok", "experts.per_token", 8),
        size("moe_intermediate_size", "experts.d_ff", 768),
        switch("norm_topk_prob", "experts.normalize", default=False),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        unread("output_router_logits"),
        SparseLayers(),
        *_CHOICES,
    ),
    tensors=(
        *TENSORS,
        *experts(
            f"{_PLACE}.gate",
            f"{_PLACE}.experts.{{expert}}",
            {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        ),
    ),
)
