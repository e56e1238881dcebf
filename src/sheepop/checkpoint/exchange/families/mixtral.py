"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    IMPLIED,
    PRE_NORMS,
    sizes,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
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
from sheepop.checkpoint.exchange.windows import Window

_PLACE = "model.layers.{layer}.block_sparse_moe"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    implied={**IMPLIED, "experts": {"scores": "softmax", "normalize": True, "router_z_loss": 0.0}},
    fields=(
        *sizes(vocab_size=32000, max_seq_len=131072),
        size("intermediate_size", "d_ff", 14336),
        optional_size("num_key_value_heads", "num_kv_heads", 8),
        optional_size("head_dim", "head_dim", None),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        count("num_local_experts", "experts.count", 8, "num_experts"),
        size("num_experts_per_tok", "experts.per_token", 2),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        fixed("router_jitter_noise", 0.0, 0),
        unread("output_router_logits"),
        Window(default=None),
        Dropouts(None, "attention_dropout", None),
        Rotary(base=1_000_000.0),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        *experts(f"{_PLACE}.gate", f"{_PLACE}.experts.{{expert}}", {"gate": "w1", "down": "w2", "up": "w3"}),
        *HEAD,
    ),
)
