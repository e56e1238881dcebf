"""Mistral (Llama with a sliding window in every layer) and Mixtral (Mistral with experts in every layer)."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING,
    HEAD,
    HEAD_DIM,
    IMPLIED,
    PRE_NORMS,
    TENSORS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import Window
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import experts
from sheepop.checkpoint.mapping import count, fixed, implied, number, size, unread

_PLACE = "model.layers.{layer}.block_sparse_moe"

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=131072, d_ff=14336, num_kv_heads=8),
        HEAD_DIM,
        ATTENTION_DROPOUT,
        Window(default=4096),
        RopeParameters(),
    ),
    tensors=TENSORS,
)

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=131072, d_ff=14336, num_kv_heads=8, norm_eps=1e-5),
        HEAD_DIM,
        ATTENTION_DROPOUT,
        Window(default=None),
        RopeParameters(base=1_000_000.0),
        *implied(**{"experts.scores": "softmax", "experts.normalize": True, "experts.router_z_loss": 0.0}),
        count("num_local_experts", "experts.count", 8, "num_experts"),
        size("num_experts_per_tok", "experts.per_token", 2),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        fixed("router_jitter_noise", 0.0, 0),
        unread("output_router_logits"),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        *experts(f"{_PLACE}.gate", f"{_PLACE}.experts.{{expert}}", {"gate": "w1", "down": "w2", "up": "w3"}),
        *HEAD,
    ),
)
