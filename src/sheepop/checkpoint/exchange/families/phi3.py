"""Phi-3: Llama with the projections of attention, and those of the feed-forward network, in one tensor each."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    IMPLIED,
    PRE_NORMS,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
    context,
    count,
    fixed,
    number,
    optional_size,
    size,
    switch,
)
from sheepop.checkpoint.exchange.rotary import Rotary
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, stacked
from sheepop.checkpoint.exchange.windows import Window

_GATE_UP = ("blocks.{layer}.feed_forward.gate_proj", "blocks.{layer}.feed_forward.up_proj")
_FUSED = (*QUERY_KEY_VALUE, *_GATE_UP)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    implied=IMPLIED,
    fields=(
        size("vocab_size", "vocab_size", 32064),
        size("hidden_size", "d_model", 3072),
        count("num_hidden_layers", "num_layers", 32),
        size("num_attention_heads", "num_heads", 32),
        context("max_position_embeddings", 4096),
        size("intermediate_size", "d_ff", 8192),
        optional_size("num_key_value_heads", "num_kv_heads", None),
        optional_size("head_dim", "head_dim", None),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        Window(default=None),
        Dropouts("embd_pdrop", "attention_dropout", "resid_pdrop"),
        Rotary(fraction=1.0, scalings=("longrope",), original=4096),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
        fixed("lm_head_bias", False),
        # Of the program code that came with Phi-4-mini, at values that leave the network as it is.
        fixed("full_attn_mod", 1),
        fixed("interpolate_factor", 1),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *stacked(QUERY_KEY_VALUE, "model.layers.{layer}.self_attn.qkv_proj"),
        *stacked(_GATE_UP, "model.layers.{layer}.mlp.gate_up_proj"),
        *(rule for rule in (*ATTENTION, *FEED_FORWARD) if rule.ours[0].removesuffix(".weight") not in _FUSED),
        *HEAD,
    ),
)
