"""Phi-3: Llama with fused tensors for queries, keys and values, and for gate and up projection."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    IMPLIED,
    PRE_NORMS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import Dropouts, Window
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, stacked
from sheepop.checkpoint.mapping import fixed

_GATE_UP = ("blocks.{layer}.feed_forward.gate_proj", "blocks.{layer}.feed_forward.up_proj")
_FUSED = (*QUERY_KEY_VALUE, *_GATE_UP)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32064, max_seq_len=4096, d_ff=8192, d_model=3072, norm_eps=1e-5),
        HEAD_DIM,
        Window(default=None),
        Dropouts("embd_pdrop", "attention_dropout", "resid_pdrop"),
        RopeParameters(fraction=1.0, scalings=("longrope",), original=4096),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
        fixed("lm_head_bias", False),
        # Keys of the program code of Phi-4-mini, at values without an effect.
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
