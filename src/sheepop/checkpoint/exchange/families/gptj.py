"""GPT-J: one LayerNorm for both sublayers, part of each head rotated in neighbouring pairs, biases of few layers."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Dropouts
from sheepop.checkpoint.exchange.tensor_rules import ROTARY_PAIRS, TensorRule, same
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Field,
    Settings,
    context,
    count,
    fixed,
    implied,
    number,
    size,
    switch,
    unread,
)
from sheepop.model.config import ModelConfig

_BLOCK = "blocks.{layer}"
_LAYER = "transformer.h.{layer}"


class RotatedColumns(Field):
    """`rotary_dim`, the number of columns of each head that rotate. This field must follow the sizes."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns their share of the head's columns."""
        columns, width = given.typed("rotary_dim", int, 64), settings["d_model"] // max(1, settings["num_heads"])
        if not 0 < columns <= width:
            raise given.problem("rotary_dim", f"is not a number of columns of heads with {width}")
        # Half a column more than the number, which is rounded down.
        return {"rotary_fraction": 1.0 if columns == width else (columns + 0.5) / width}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the number of columns."""
        return {"rotary_dim": config.rotary_dim}


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    fields=(
        *implied(
            position_encoding="rope", norm="layernorm", norm_position="pre", bias=True, attention_bias=False,
            attention_output_bias=False, parallel_residual=True, shared_norm=True, head_bias=True,
        ),
        size("vocab_size", "vocab_size", 50400),
        size("n_embd", "d_model", 4096, "hidden_size"),
        count("n_layer", "num_layers", 28, "num_hidden_layers"),
        size("n_head", "num_heads", 16, "num_attention_heads"),
        context("n_positions", 2048, "max_position_embeddings"),
        RotatedColumns(),
        size("n_inner", "d_ff", None, optional=True),
        Activation("activation_function", {"gelu_new": "gelu_tanh", **PLAIN_ACTIVATIONS}, "gelu_new"),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        Dropouts("embd_pdrop", "attn_pdrop", "resid_pdrop"),
        fixed("rotary", True),
        fixed("scale_attn_weights", True),
        # A head for another task.
        unread(
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ),
    ),
    tensors=(
        TensorRule(("embedding.weight",), "transformer.wte.weight"),
        *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.ln_1"),
        *same(f"{_BLOCK}.attention.q_proj", f"{_LAYER}.attn.q_proj", layout=ROTARY_PAIRS),
        *same(f"{_BLOCK}.attention.k_proj", f"{_LAYER}.attn.k_proj", layout=ROTARY_PAIRS),
        *same(f"{_BLOCK}.attention.v_proj", f"{_LAYER}.attn.v_proj"),
        *same(f"{_BLOCK}.attention.o_proj", f"{_LAYER}.attn.out_proj"),
        *same(f"{_BLOCK}.feed_forward.up_proj", f"{_LAYER}.mlp.fc_in"),
        *same(f"{_BLOCK}.feed_forward.down_proj", f"{_LAYER}.mlp.fc_out"),
        *same("final_norm", "transformer.ln_f"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
        TensorRule(("lm_head.bias",), "lm_head.bias"),
    ),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)  # fmt: skip
