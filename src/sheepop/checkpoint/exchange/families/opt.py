"""OPT: learned positions, whose table begins with two rows that nothing reads, and LayerNorm."""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import PLAIN_ACTIVATIONS, Activation, Derived, Dropouts
from sheepop.checkpoint.exchange.tensor_rules import BLOCK, Behind, TensorRule, same, under
from sheepop.checkpoint.mapping import context, count, fixed, implied, number, size, switch

_LAYER = "model.decoder.layers.{layer}"

OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    fields=(
        *implied(
            position_encoding="learned", norm="layernorm", norm_position="pre", norm_eps=1e-5, bias=False,
            norm_bias=True,
        ),
        size("vocab_size", "vocab_size", 50272),
        size("hidden_size", "d_model", 768),
        count("num_hidden_layers", "num_layers", 12),
        size("num_attention_heads", "num_heads", 12),
        size("ffn_dim", "d_ff", 3072),
        context("max_position_embeddings", 2048),
        Activation("activation_function", PLAIN_ACTIVATIONS, "relu"),
        switch("tie_word_embeddings", "tie_weights", default=True),
        switch("enable_bias", "attention_bias", "attention_output_bias", "feed_forward_bias", default=True),
        number("init_std", "initial_std", 0.02),
        Dropouts(None, "attention_dropout", "dropout"),
        fixed("layerdrop", 0.0, 0),
        fixed("do_layer_norm_before", True),
        fixed("_remove_final_layer_norm", False),
        fixed("layer_norm_elementwise_affine", True),
        Derived("word_embed_proj_dim", "d_model"),
    ),
    tensors=(
        TensorRule(("embedding.weight",), "model.decoder.embed_tokens.weight"),
        TensorRule(("added_positions.table",), "model.decoder.embed_positions.weight", Behind(skipped=2)),
        *under(BLOCK, _LAYER, attention_norm="self_attn_layer_norm", feed_forward_norm="final_layer_norm"),
        *under(f"{BLOCK}.attention", f"{_LAYER}.self_attn", "q_proj", "k_proj", "v_proj", o_proj="out_proj"),
        *under(f"{BLOCK}.feed_forward", _LAYER, up_proj="fc1", down_proj="fc2"),
        *same("final_norm", "model.decoder.final_layer_norm"),
        TensorRule(("lm_head.weight",), "lm_head.weight"),
    ),
)  # fmt: skip
