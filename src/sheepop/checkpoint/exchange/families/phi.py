"""Phi: in 1.5 and 2 both sublayers read one LayerNorm; Phi-3 is Llama with fused tensors.

Fused are queries, keys and values, and gate and up projection.
"""

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
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Chosen, Dropouts, Window
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, TensorRule, fused, same
from sheepop.checkpoint.mapping import fixed, implied

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

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    fields=(
        *implied(
            position_encoding="rope", norm="layernorm", norm_position="pre", bias=True, parallel_residual=True,
            shared_norm=True, head_bias=True,
        ),
        *llama_keys(
            51200, 2048, d_ff=8192, d_model=2048, num_layers=24, norm_eps=1e-5, norm_key="layer_norm_eps",
            activation=Activation("hidden_act", {"gelu_new": "gelu_tanh", **PLAIN_ACTIVATIONS}, "gelu_new"),
        ),
        HEAD_DIM,
        Dropouts("embd_pdrop", "attention_dropout", "resid_pdrop"),
        Chosen("qk_layernorm", "qk_norm", "head"),
        RopeParameters(fraction=0.5),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *(rule for name in "qkv" for rule in same(f"{BLOCK}.attention.{name}_proj", f"{LAYER}.self_attn.{name}_proj")),
        *same(f"{BLOCK}.attention.q_norm", f"{LAYER}.self_attn.q_layernorm"),
        *same(f"{BLOCK}.attention.k_norm", f"{LAYER}.self_attn.k_layernorm"),
        *same(f"{BLOCK}.attention.o_proj", f"{LAYER}.self_attn.dense"),
        *same(f"{BLOCK}.feed_forward.up_proj", f"{LAYER}.mlp.fc1"),
        *same(f"{BLOCK}.feed_forward.down_proj", f"{LAYER}.mlp.fc2"),
        *same("final_norm", "model.final_layernorm"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
        TensorRule(("lm_head.bias",), "lm_head.bias"),
    ),
)  # fmt: skip
