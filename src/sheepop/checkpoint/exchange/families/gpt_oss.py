"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, windows in every second layer."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAYER,
    PRE_NORMS,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import windows_by_period
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import EXPERTS, STACKED_EXPERTS, TensorRule, router
from sheepop.checkpoint.mapping import context, count, fixed, implied, number, size, switch, unread

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *implied(
            position_encoding="rope", norm="rmsnorm", norm_position="pre", bias=False, feed_forward_bias=True,
            attention_sinks=True, activation="swiglu_clamped",
        ),
        *implied(**{
            "experts.scores": "softmax", "experts.normalize": True, "experts.router_bias": True,
            "experts.router_z_loss": 0.0,
        }),
        size("vocab_size", "vocab_size", 201088),
        size("hidden_size", "d_model", 2880),
        count("num_hidden_layers", "num_layers", 36),
        size("num_attention_heads", "num_heads", 64),
        size("num_key_value_heads", "num_kv_heads", 8, optional=True),
        size("head_dim", "head_dim", 64, optional=True),
        size("intermediate_size", "d_ff", 2880),
        context("max_position_embeddings", 131072),
        number("rms_norm_eps", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=True),
        ATTENTION_DROPOUT,
        fixed("hidden_act", "silu"),
        fixed("swiglu_alpha", 1.702),
        fixed("swiglu_limit", 7.0, 7),
        count("num_local_experts", "experts.count", 128, "num_experts"),
        size("num_experts_per_tok", "experts.per_token", 4),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        unread("output_router_logits"),
        windows_by_period(128, 2),
        RopeParameters(base=150_000.0, missing=_YARN),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        TensorRule((f"{BLOCK}.attention.sinks",), f"{LAYER}.self_attn.sinks"),
        *router(f"{LAYER}.mlp.router"),
        *(
            TensorRule(
                tuple(f"{EXPERTS}.experts.{name}_{kind}" for name in names),
                f"{LAYER}.mlp.experts.{theirs}{suffix}",
                STACKED_EXPERTS,
            )
            for names, theirs in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj"))
            for kind, suffix in (("proj", ""), ("bias", "_bias"))
        ),
        *HEAD,
    ),
)  # fmt: skip
