"""Families with LayerNorm: GPT-2, GPT-J, GPT-NeoX and Pythia, BLOOM, Cohere, StableLM, StarCoder 2, Phi 1.5 and 2."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families import llama
from sheepop.checkpoint.exchange.families.llama import ATTENTION_BIAS, ATTENTION_DROPOUT, HEAD_DIM, LAYER, llama_keys
from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.fields import (
    PLAIN_ACTIVATIONS,
    Activation,
    Chosen,
    Dropouts,
    Window,
    plain_activation,
    where_it_slides,
    windows_by_period,
)
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import (
    BLOCK,
    INTERLEAVED,
    PER_EXPERT,
    QUERY_KEY_VALUE,
    ROTARY_PAIRS,
    TRANSPOSED,
    TensorRule,
    fused,
    same,
    under,
)
from sheepop.checkpoint.mapping import (
    Converted,
    Field,
    Fixed,
    Settings,
    context,
    count,
    fixed,
    implied,
    number,
    output_scale,
    score_scale,
    size,
    switch,
    unread,
    without,
)
from sheepop.model.config import ModelConfig

_IMPLIED = implied(position_encoding="rope", norm="layernorm", norm_position="pre", bias=False)
_BIASED = implied(norm="layernorm", norm_position="pre", bias=True)
_HEAD = TensorRule(("lm_head.weight",), "lm_head.weight")
_HEAD_BIAS = TensorRule(("lm_head.bias",), "lm_head.bias")
_ATTENTION, _FEED_FORWARD = f"{BLOCK}.attention", f"{BLOCK}.feed_forward"


def _gpt_keys(
    vocab_size: int, d_model: int, num_layers: int, num_heads: int, max_seq_len: int, *, tied: bool, dropout: float
) -> tuple[Field, ...]:
    """Returns the keys that GPT-2 and GPT-J share, with these defaults."""
    return (
        *_BIASED,
        size("vocab_size", "vocab_size", vocab_size),
        size("n_embd", "d_model", d_model, "hidden_size"),
        count("n_layer", "num_layers", num_layers, "num_hidden_layers"),
        size("n_head", "num_heads", num_heads, "num_attention_heads"),
        context("n_positions", max_seq_len, "max_position_embeddings"),
        size("n_inner", "d_ff", None, optional=True),
        plain_activation("activation_function", "gelu_new"),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        switch("tie_word_embeddings", "tie_weights", default=tied),
        Dropouts("embd_pdrop", "attn_pdrop", "resid_pdrop", default=dropout),
        # A head for another task.
        unread("summary_type", "summary_use_proj", "summary_activation"),
        unread("summary_proj_to_labels", "summary_first_dropout"),
    )


_GPT_LAYER = "transformer.h.{layer}"
_GPT_TENSORS = (
    TensorRule(("embedding.weight",), "transformer.wte.weight"),
    *same(f"{BLOCK}.attention_norm", f"{_GPT_LAYER}.ln_1"),
    *same("final_norm", "transformer.ln_f"),
    _HEAD,
)

# Matrices are stored as (in, out).
GPT2 = family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        *_GPT_TENSORS,
        TensorRule(("added_positions.table",), "transformer.wpe.weight"),
        *same(f"{BLOCK}.feed_forward_norm", f"{_GPT_LAYER}.ln_2"),
        *fused(QUERY_KEY_VALUE, f"{_GPT_LAYER}.attn.c_attn", TRANSPOSED),
        *under(_ATTENTION, f"{_GPT_LAYER}.attn", layout=TRANSPOSED, o_proj="c_proj"),
        *under(_FEED_FORWARD, f"{_GPT_LAYER}.mlp", layout=TRANSPOSED, up_proj="c_fc", down_proj="c_proj"),
    ),
    *implied(position_encoding="learned"),
    *_gpt_keys(50257, 768, 12, 12, 1024, tied=True, dropout=0.1),
    # Whether scores are divided by the root of the head width.
    Converted(
        "scale_attn_weights", bool, True,
        lambda scales, _: {"attention_scale": None if scales else 1.0},
        lambda config: score_scale(config) != 1.0 or config.head_size == 1,
    ),
    fixed("scale_attn_by_inverse_layer_idx", False),
    # The precision of scores, a head for another task, a copy of n_positions, and keys of the first versions.
    unread("reorder_and_upcast_attn", "summary_last_dropout", "n_ctx", "n_special", "predict_special_tokens"),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


def _rotated_columns(columns: int, settings: Settings) -> Settings:
    """Returns the share of a head's columns that rotate."""
    width = settings["d_model"] // max(1, settings["num_heads"])
    if not 0 < columns <= width:
        raise ValueError(f"is not a number of columns of heads with {width}")
    # Half a column more than the number, which is rounded down.
    return {"rotary_fraction": 1.0 if columns == width else (columns + 0.5) / width}


def _rotary_dim(config: ModelConfig) -> int:
    return config.rotary_dim


# One norm for both sublayers, part of each head rotated in neighbouring pairs, biases of few layers.
GPTJ = family(
    "gptj",
    "GPTJForCausalLM",
    (
        *_GPT_TENSORS,
        *under(_ATTENTION, f"{_GPT_LAYER}.attn", "q_proj", "k_proj", layout=ROTARY_PAIRS),
        *under(_ATTENTION, f"{_GPT_LAYER}.attn", "v_proj", o_proj="out_proj"),
        *under(_FEED_FORWARD, f"{_GPT_LAYER}.mlp", up_proj="fc_in", down_proj="fc_out"),
        _HEAD_BIAS,
    ),
    *implied(position_encoding="rope", attention_bias=False, attention_output_bias=False),
    *implied(parallel_residual=True, shared_norm=True, head_bias=True),
    *_gpt_keys(50400, 4096, 28, 16, 2048, tied=False, dropout=0.0),
    Converted("rotary_dim", int, 64, _rotated_columns, _rotary_dim),
    fixed("rotary", True),
    fixed("scale_attn_weights", True),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)

# Parallel attention and feed-forward, a quarter of each head rotated.
_NEOX_LAYER = "gpt_neox.layers.{layer}"
GPT_NEOX = family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        TensorRule(("embedding.weight",), "gpt_neox.embed_in.weight"),
        *under(BLOCK, _NEOX_LAYER, attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"),
        *fused(QUERY_KEY_VALUE, f"{_NEOX_LAYER}.attention.query_key_value", INTERLEAVED),
        *same(f"{_ATTENTION}.o_proj", f"{_NEOX_LAYER}.attention.dense"),
        *under(_FEED_FORWARD, f"{_NEOX_LAYER}.mlp", up_proj="dense_h_to_4h", down_proj="dense_4h_to_h"),
        *same("final_norm", "gpt_neox.final_layer_norm"),
        TensorRule(("lm_head.weight",), "embed_out.weight"),
    ),
    *_BIASED,
    *implied(position_encoding="rope"),
    *without(
        llama_keys(
            50432, 2048, d_ff=24576, d_model=6144, num_layers=44, num_heads=64, norm_eps=1e-5,
            norm_key="layer_norm_eps", activation=Activation("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
        ),
        "num_key_value_heads",
    ),
    switch("use_parallel_residual", "parallel_residual", default=True),
    switch("attention_bias", "attention_bias", "attention_output_bias", default=True),
    Dropouts("hidden_dropout", "attention_dropout", "hidden_dropout"),
    RopeParameters(
        fraction=0.25,
        base_keys=("rotary_emb_base", "rope_theta"),
        fraction_keys=("rotary_pct", "partial_rotary_factor"),
    ),
    unread("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    prefix="gpt_neox.",
    renamed={"lm_head.weight": "embed_out.weight"},
    buffers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)  # fmt: skip

# Linear distance biases and a norm after the embedding.
BLOOM = family(
    "bloom",
    "BloomForCausalLM",
    (
        TensorRule(("embedding.weight",), "transformer.word_embeddings.weight"),
        *same("embedding_norm", "transformer.word_embeddings_layernorm"),
        *under(BLOCK, _GPT_LAYER, attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"),
        *fused(QUERY_KEY_VALUE, f"{_GPT_LAYER}.self_attention.query_key_value", INTERLEAVED),
        *same(f"{_ATTENTION}.o_proj", f"{_GPT_LAYER}.self_attention.dense"),
        *under(_FEED_FORWARD, f"{_GPT_LAYER}.mlp", up_proj="dense_h_to_4h", down_proj="dense_4h_to_h"),
        *same("final_norm", "transformer.ln_f"),
        _HEAD,
    ),
    *_BIASED,
    *implied(position_encoding="alibi", embedding_norm=True, activation="gelu_tanh"),
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
    unread("pretraining_tp", "skip_bias_add", "bias_dropout_fusion", "masked_softmax_fusion"),
    unread("attention_softmax_in_fp32", "offset_alibi"),
    prefix="transformer.",
)

# Both sublayers read one norm, which has no bias.
_COHERE_FIELDS = (
    *_IMPLIED,
    *implied(parallel_residual=True, shared_norm=True),
    *llama_keys(
        256000, 8192, d_ff=22528, d_model=8192, num_layers=40, num_heads=64, norm_eps=1e-5, norm_key="layer_norm_eps",
        tied=True,
    ),
    HEAD_DIM, ATTENTION_BIAS, ATTENTION_DROPOUT,
    output_scale("logit_scale", 0.0625),
)  # fmt: skip

COHERE = family(
    "cohere",
    "CohereForCausalLM",
    llama.PAIRED_TENSORS,
    *_COHERE_FIELDS,
    Chosen("use_qk_norm", "qk_norm", "own_head"),
    RopeParameters(base=500_000.0),
)

COHERE2 = family(
    "cohere2",
    "Cohere2ForCausalLM",
    llama.PAIRED_TENSORS,
    *_COHERE_FIELDS,
    windows_by_period(4096, 4, "sliding_window_pattern", where_it_slides),
    RopeParameters(),
)

_STABLELM_NORMS = {f"{name}_norm": f"{name}_layernorm.norms.{{expert}}" for name in "qk"}
STABLELM = family(
    "stablelm",
    "StableLmForCausalLM",
    (*llama.TENSORS, *under(_ATTENTION, f"{LAYER}.self_attn", layout=PER_EXPERT, **_STABLELM_NORMS)),
    *_IMPLIED,
    *implied(norm_bias=True),
    *llama_keys(50304, 4096, d_ff=6912, d_model=2560, num_kv_heads=32, norm_eps=1e-5, norm_key="layer_norm_eps"),
    switch("use_qkv_bias", "attention_bias", default=False),
    switch("use_parallel_residual", "parallel_residual", "shared_norm", default=False),
    Chosen("qk_layernorm", "qk_norm", "own_head"),
    Dropouts(None, "attention_dropout", "hidden_dropout"),
    RopeParameters(fraction=0.25),
)

STARCODER2 = family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS, *llama.ATTENTION,
        *under(_FEED_FORWARD, f"{LAYER}.mlp", up_proj="c_fc", down_proj="c_proj"),
        *llama.HEAD,
    ),
    *_IMPLIED,
    *implied(norm_bias=True),
    *llama_keys(
        49152, 4096, d_ff=12288, d_model=3072, num_layers=30, num_heads=24, num_kv_heads=2, norm_eps=1e-5,
        norm_key="norm_epsilon", tied=True, activation=plain_activation("hidden_act", "gelu_pytorch_tanh"),
    ),
    HEAD_DIM,
    number("initializer_range", "initial_std", 0.018042),
    switch("use_bias", "attention_bias", "attention_output_bias", "feed_forward_bias", default=True),
    Window(default=None),
    Dropouts("embedding_dropout", "attention_dropout", "residual_dropout"),
    RopeParameters(),
)  # fmt: skip

# Both sublayers read one norm, and the output projection has a bias.
PHI = family(
    "phi",
    "PhiForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS,
        *under(
            _ATTENTION, f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj",
            o_proj="dense",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
        ),
        *under(_FEED_FORWARD, f"{LAYER}.mlp", up_proj="fc1", down_proj="fc2"),
        *same("final_norm", "model.final_layernorm"),
        _HEAD, _HEAD_BIAS,
    ),
    *_BIASED,
    *implied(position_encoding="rope", parallel_residual=True, shared_norm=True, head_bias=True),
    *llama_keys(
        51200, 2048, d_ff=8192, d_model=2048, num_layers=24, norm_eps=1e-5, norm_key="layer_norm_eps",
        activation=plain_activation("hidden_act", "gelu_new"),
    ),
    HEAD_DIM,
    Dropouts("embd_pdrop", "attention_dropout", "resid_pdrop"),
    Chosen("qk_layernorm", "qk_norm", "head"),
    RopeParameters(fraction=0.5),
)  # fmt: skip
