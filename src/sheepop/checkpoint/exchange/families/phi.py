"""Phi-3: Llama with fused tensors for queries, keys and values, and for gate and up projection."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    BLOCK,
    EMBEDDING,
    FUSED_FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    IMPLIED,
    LAYER,
    PRE_NORMS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import Dropouts, Window
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, fused, same
from sheepop.checkpoint.mapping import fixed

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
        *fused(QUERY_KEY_VALUE, f"{LAYER}.self_attn.qkv_proj"),
        *same(f"{BLOCK}.attention.o_proj", f"{LAYER}.self_attn.o_proj"),
        *FUSED_FEED_FORWARD,
        *HEAD,
    ),
)
