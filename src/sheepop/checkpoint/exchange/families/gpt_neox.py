"""GPT-NeoX and Pythia: parallel attention and feed-forward, a quarter of each head rotated."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Dropouts
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import INTERLEAVED, QUERY_KEY_VALUE, TensorRule, fused, same
from sheepop.checkpoint.mapping import context, count, implied, number, size, switch, unread

_BLOCK = "blocks.{layer}"
_LAYER = "gpt_neox.layers.{layer}"

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields=(
        *implied(position_encoding="rope", norm="layernorm", norm_position="pre", bias=True),
        size("vocab_size", "vocab_size", 50432),
        size("hidden_size", "d_model", 6144),
        count("num_hidden_layers", "num_layers", 44),
        size("num_attention_heads", "num_heads", 64),
        context("max_position_embeddings", 2048),
        size("intermediate_size", "d_ff", 24576),
        Activation("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
        number("layer_norm_eps", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=False),
        switch("use_parallel_residual", "parallel_residual", default=True),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=True),
        Dropouts("hidden_dropout", "attention_dropout", "hidden_dropout"),
        RopeParameters(
            fraction=0.25,
            base_keys=("rotary_emb_base", "rope_theta"),
            fraction_keys=("rotary_pct", "partial_rotary_factor"),
        ),
        unread("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    ),
    tensors=(
        TensorRule(("embedding.weight",), "gpt_neox.embed_in.weight"),
        *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.input_layernorm"),
        *fused(QUERY_KEY_VALUE, f"{_LAYER}.attention.query_key_value", INTERLEAVED),
        *same(f"{_BLOCK}.attention.o_proj", f"{_LAYER}.attention.dense"),
        *same(f"{_BLOCK}.feed_forward_norm", f"{_LAYER}.post_attention_layernorm"),
        *same(f"{_BLOCK}.feed_forward.up_proj", f"{_LAYER}.mlp.dense_h_to_4h"),
        *same(f"{_BLOCK}.feed_forward.down_proj", f"{_LAYER}.mlp.dense_4h_to_h"),
        *same("final_norm", "gpt_neox.final_layer_norm"),
        TensorRule(("lm_head.weight",), "embed_out.weight"),
    ),
    prefix="gpt_neox.",
    renamed={"lm_head.weight": "embed_out.weight"},
    buffers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)
