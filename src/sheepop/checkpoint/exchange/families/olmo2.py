"""OLMo 2: norms only after the sublayers, and norms over the whole width of queries and keys."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import same
from sheepop.checkpoint.mapping import implied

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(
        *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="width", bias=False),
        *llama_keys(vocab_size=50304, max_seq_len=2048, d_ff=11008, norm_eps=1e-5),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        RopeParameters(),
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
