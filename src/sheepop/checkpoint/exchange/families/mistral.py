"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import IMPLIED, TENSORS, sizes
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
    number,
    optional_size,
    size,
    switch,
)
from sheepop.checkpoint.exchange.rotary import Rotary
from sheepop.checkpoint.exchange.windows import Window

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    implied=IMPLIED,
    fields=(
        *sizes(vocab_size=32000, max_seq_len=131072),
        size("intermediate_size", "d_ff", 14336),
        optional_size("num_key_value_heads", "num_kv_heads", 8),
        optional_size("head_dim", "head_dim", None),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", 1e-6),
        switch("tie_word_embeddings", "tie_weights", default=False),
        Window(default=4096),
        Dropouts(None, "attention_dropout", None),
        Rotary(),
    ),
    tensors=TENSORS,
)
