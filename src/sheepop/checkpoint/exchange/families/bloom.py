"""BLOOM: linear distance biases (ALiBi) and a norm after the embedding."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import Dropouts
from sheepop.checkpoint.exchange.tensor_rules import INTERLEAVED, QUERY_KEY_VALUE, TensorRule, fused, same
from sheepop.checkpoint.mapping import Fixed, context, count, fixed, implied, number, size, switch, unread

_BLOCK = "blocks.{layer}"
_LAYER = "transformer.h.{layer}"

BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    fields=(
        *implied(
            position_encoding="alibi", norm="layernorm", norm_position="pre", embedding_norm=True,
            activation="gelu_tanh", bias=True,
        ),
        size("vocab_size", "vocab_size", 250880),
        size("hidden_size", "d_model", 64, "n_embed", "n_embd"),
        count("n_layer", "num_layers", 2, "num_hidden_layers"),
        size("n_head", "num_heads", 8, "num_attention_heads"),
        # ALiBi has no last position; this is the training length of the published models.
        context("seq_length", 2048),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=True),
        Dropouts(None, "attention_dropout", "hidden_dropout"),
        fixed("apply_residual_connection_post_layernorm", False),
        fixed("n_inner", None),
        fixed("skip_bias_add_qkv", False),
        Fixed("slow_but_exact", (False,), "with which transformers leaves out some biases"),
        # Parallelism and kernel fusion of the training program.
        unread(
            "pretraining_tp", "skip_bias_add", "bias_dropout_fusion", "masked_softmax_fusion",
            "attention_softmax_in_fp32", "offset_alibi",
        ),
    ),
    tensors=(
        TensorRule(("embedding.weight",), "transformer.word_embeddings.weight"),
        *same("embedding_norm", "transformer.word_embeddings_layernorm"),
        *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.input_layernorm"),
        *fused(QUERY_KEY_VALUE, f"{_LAYER}.self_attention.query_key_value", INTERLEAVED),
        *same(f"{_BLOCK}.attention.o_proj", f"{_LAYER}.self_attention.dense"),
        *same(f"{_BLOCK}.feed_forward_norm", f"{_LAYER}.post_attention_layernorm"),
        *same(f"{_BLOCK}.feed_forward.up_proj", f"{_LAYER}.mlp.dense_h_to_4h"),
        *same(f"{_BLOCK}.feed_forward.down_proj", f"{_LAYER}.mlp.dense_4h_to_h"),
        *same("final_norm", "transformer.ln_f"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
    ),
    prefix="transformer.",
)  # fmt: skip
