"""Families with LayerNorm and rotary positions: Cohere, StableLM, StarCoder 2."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    BLOCK,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    LAYER,
    PAIRED_ATTENTION,
    PRE_NORMS,
    TENSORS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    PLAIN_ACTIVATIONS,
    Activation,
    Dropouts,
    Window,
    where_it_slides,
    windows_by_period,
)
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import same
from sheepop.checkpoint.mapping import OutputScale, fixed, implied, number, switch

_IMPLIED = implied(position_encoding="rope", norm="layernorm", norm_position="pre", bias=False)

# Both sublayers read one norm, which has no bias.
_COHERE_FIELDS = (
    *_IMPLIED,
    *implied(parallel_residual=True, shared_norm=True),
    *llama_keys(
        256000, 8192, d_ff=22528, d_model=8192, num_layers=40, num_heads=64, norm_eps=1e-5, norm_key="layer_norm_eps",
        tied=True,
    ),
    HEAD_DIM,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    OutputScale("logit_scale", 0.0625),
)  # fmt: skip
_COHERE_TENSORS = (*EMBEDDING, *PRE_NORMS, *PAIRED_ATTENTION, *FEED_FORWARD, *HEAD)

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields=(*_COHERE_FIELDS, fixed("use_qk_norm", False, None), RopeParameters(base=500_000.0)),
    tensors=_COHERE_TENSORS,
)

COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fields=(
        *_COHERE_FIELDS,
        windows_by_period(4096, 4, "sliding_window_pattern", where_it_slides),
        RopeParameters(),
    ),
    tensors=_COHERE_TENSORS,
)

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields=(
        *_IMPLIED,
        *implied(norm_bias=True),
        *llama_keys(
            50304, 4096, d_ff=6912, d_model=2560, num_kv_heads=32, norm_eps=1e-5, norm_key="layer_norm_eps",
        ),
        switch("use_qkv_bias", "attention_bias", default=False),
        switch("use_parallel_residual", "parallel_residual", "shared_norm", default=False),
        fixed("qk_layernorm", False),
        Dropouts(None, "attention_dropout", "hidden_dropout"),
        RopeParameters(fraction=0.25),
    ),
    tensors=TENSORS,
)  # fmt: skip

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields=(
        *_IMPLIED,
        *implied(norm_bias=True),
        *llama_keys(
            49152, 4096, d_ff=12288, d_model=3072, num_layers=30, num_heads=24, num_kv_heads=2, norm_eps=1e-5,
            norm_key="norm_epsilon", tied=True, activation=Activation(
                "hidden_act", {"gelu_pytorch_tanh": "gelu_tanh", **PLAIN_ACTIVATIONS}, "gelu_pytorch_tanh"
            ),
        ),
        HEAD_DIM,
        number("initializer_range", "initial_std", 0.018042),
        switch("use_bias", "attention_bias", "attention_output_bias", "feed_forward_bias", default=True),
        Window(default=None),
        Dropouts("embedding_dropout", "attention_dropout", "residual_dropout"),
        RopeParameters(),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        *same(f"{BLOCK}.feed_forward.up_proj", f"{LAYER}.mlp.c_fc"),
        *same(f"{BLOCK}.feed_forward.down_proj", f"{LAYER}.mlp.c_proj"),
        *HEAD,
    ),
)  # fmt: skip
