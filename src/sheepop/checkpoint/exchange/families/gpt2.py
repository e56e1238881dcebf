"""GPT-2: learned positions, matrices stored as (in, out), one projection for queries, keys and values."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Dropouts
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, TRANSPOSED, TensorRule, fused, same
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Field,
    Settings,
    context,
    count,
    fixed,
    implied,
    number,
    score_scale,
    size,
    switch,
    unread,
)
from sheepop.model.config import ModelConfig

_BLOCK = "blocks.{layer}"
_LAYER = "transformer.h.{layer}"


class ScoreScaling(Field):
    """`scale_attn_weights`: whether scores are divided by the root of the head width (GPT-2)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the scale 1, or null for the usual one."""
        return {"attention_scale": None if given.typed("scale_attn_weights", bool, True) else 1.0}

    def write(self, config: ModelConfig) -> Settings:
        """Returns false if the scale is 1."""
        return {"scale_attn_weights": score_scale(config) != 1.0 or config.head_size == 1}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        *implied(position_encoding="learned", norm="layernorm", norm_position="pre", bias=True),
        size("vocab_size", "vocab_size", 50257),
        size("n_embd", "d_model", 768, "hidden_size"),
        count("n_layer", "num_layers", 12, "num_hidden_layers"),
        size("n_head", "num_heads", 12, "num_attention_heads"),
        context("n_positions", 1024, "max_position_embeddings"),
        size("n_inner", "d_ff", None, optional=True),
        Activation("activation_function", {"gelu_new": "gelu_tanh", **PLAIN_ACTIVATIONS}, "gelu_new"),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=True),
        ScoreScaling(),
        Dropouts("embd_pdrop", "attn_pdrop", "resid_pdrop", default=0.1),
        fixed("scale_attn_by_inverse_layer_idx", False),
        # The precision of scores, a head for another task, a copy of n_positions, and keys of the first versions.
        unread(
            "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout",
            "summary_proj_to_labels", "summary_first_dropout", "n_ctx", "n_special",
            "predict_special_tokens",
        ),
    ),
    tensors=(
        TensorRule(("embedding.weight",), "transformer.wte.weight"),
        TensorRule(("added_positions.table",), "transformer.wpe.weight"),
        *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.ln_1"),
        *fused(QUERY_KEY_VALUE, f"{_LAYER}.attn.c_attn", TRANSPOSED),
        *same(f"{_BLOCK}.attention.o_proj", f"{_LAYER}.attn.c_proj", layout=TRANSPOSED),
        *same(f"{_BLOCK}.feed_forward_norm", f"{_LAYER}.ln_2"),
        *same(f"{_BLOCK}.feed_forward.up_proj", f"{_LAYER}.mlp.c_fc", layout=TRANSPOSED),
        *same(f"{_BLOCK}.feed_forward.down_proj", f"{_LAYER}.mlp.c_proj", layout=TRANSPOSED),
        *same("final_norm", "transformer.ln_f"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
    ),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip
