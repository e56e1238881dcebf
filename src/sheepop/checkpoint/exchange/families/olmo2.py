"""OLMo 2: norms behind the sublayers only, and over the whole width of queries and keys."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    IMPLIED,
    sizes,
)
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
from sheepop.checkpoint.exchange.tensor_rules import same

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    implied={**IMPLIED, "norm_position": "output", "qk_norm": "width"},
    fields=(
        *sizes(vocab_size=50304, max_seq_len=2048),
        size("intermediate_size", "d_ff", 11008),
        optional_size("num_key_value_heads", "num_kv_heads", None),
        optional_size("head_dim", "head_dim", None),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=False),
        Dropouts(None, "attention_dropout", None),
        Rotary(),
    ),
    tensors=(
        *EMBEDDING,
        *same("blocks.{layer}.attention_output_norm", "model.layers.{layer}.post_attention_layernorm"),
        *same("blocks.{layer}.feed_forward_output_norm", "model.layers.{layer}.post_feedforward_layernorm"),
        *ATTENTION,
        *FEED_FORWARD,
        *HEAD,
    ),
)
