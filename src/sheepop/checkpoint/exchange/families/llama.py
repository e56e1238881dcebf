"""Llama and its descendants: RMSNorm, gated feed-forward networks and rotary positions; and the tables they share.

Mistral has a sliding window in every layer, and Mixtral also experts. Qwen 2 has biases of queries, keys and values,
Qwen 3 norms of queries and keys. Phi-3 has fused tensors for queries, keys and values, and for gate and up projection.
OLMo 2 has norms only after the sublayers, and norms over the whole width of queries and keys. Gemma 2 and 3 (text) have
norms before and after every sublayer, which scale by 1 + weight, and scaled embeddings.
"""

from __future__ import annotations

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
    Window,
    windows_by_period,
    windows_from_layer,
)
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import QUERY_KEY_VALUE, TensorRule, experts, fused, same
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    EmbeddingRoot,
    Field,
    Fixed,
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

_BLOCK, _LAYER = "blocks.{layer}", "model.layers.{layer}"
IMPLIED = implied(position_encoding="rope", norm="rmsnorm", norm_position="pre", bias=False)


def llama_keys(
    vocab_size: int,
    max_seq_len: int,
    *,
    d_ff: int,
    d_model: int = 4096,
    num_layers: int = 32,
    num_kv_heads: int | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Field, ...]:
    """Returns the keys that all descendants of Llama share, except head and position keys, with these defaults."""
    return (
        size("vocab_size", "vocab_size", vocab_size),
        size("hidden_size", "d_model", d_model),
        count("num_hidden_layers", "num_layers", num_layers),
        size("num_attention_heads", "num_heads", 32),
        size("num_key_value_heads", "num_kv_heads", num_kv_heads, optional=True),
        context("max_position_embeddings", max_seq_len),
        size("intermediate_size", "d_ff", d_ff),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        number("rms_norm_eps", "norm_eps", norm_eps),
        switch("tie_word_embeddings", "tie_weights", default=False),
    )


HEAD_DIM = size("head_dim", "head_dim", None, optional=True)
ATTENTION_BIAS = switch("attention_bias", "attention_bias", "attention_output_bias", default=False)
ATTENTION_DROPOUT = Dropouts(None, "attention_dropout", None)

EMBEDDING = (TensorRule(("embedding.weight",), "model.embed_tokens.weight"),)
HEAD = (*same("final_norm", "model.norm"), TensorRule(("lm_head.weight",), "lm_head.weight"))
PRE_NORMS = (
    *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.input_layernorm"),
    *same(f"{_BLOCK}.feed_forward_norm", f"{_LAYER}.post_attention_layernorm"),
)
ATTENTION = tuple(
    rule
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    for rule in same(f"{_BLOCK}.attention.{name}", f"{_LAYER}.self_attn.{name}")
)
FEED_FORWARD = tuple(
    rule
    for name in ("gate_proj", "up_proj", "down_proj")
    for rule in same(f"{_BLOCK}.feed_forward.{name}", f"{_LAYER}.mlp.{name}")
)
TENSORS = (*EMBEDDING, *PRE_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=2048, d_ff=11008),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        switch("mlp_bias", "feed_forward_bias", default=False),
        RopeParameters(),
        # Parallelism of the training program, a marker of SmolLM2, and lengths that other programs added.
        unread("pretraining_tp", "is_llama_config", "max_sequence_length", "model_max_length"),
        unread("tokenizer_model_max_length", "tokenizer_padding_side"),
        fixed("rope_interleaved", False),
    ),
    tensors=TENSORS,
    whole_heads=True,
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=131072, d_ff=14336, num_kv_heads=8),
        HEAD_DIM,
        ATTENTION_DROPOUT,
        Window(default=4096),
        RopeParameters(),
    ),
    tensors=TENSORS,
)

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=131072, d_ff=14336, num_kv_heads=8, norm_eps=1e-5),
        HEAD_DIM,
        ATTENTION_DROPOUT,
        Window(default=None),
        RopeParameters(base=1_000_000.0),
        *implied(**{"experts.scores": "softmax", "experts.normalize": True, "experts.router_z_loss": 0.0}),
        count("num_local_experts", "experts.count", 8, "num_experts"),
        size("num_experts_per_tok", "experts.per_token", 2),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        fixed("router_jitter_noise", 0.0, 0),
        unread("output_router_logits"),
    ),
    tensors=(
        *EMBEDDING,
        *PRE_NORMS,
        *ATTENTION,
        *experts(f"{_LAYER}.block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}),
        *HEAD,
    ),
)


class SparseLayers(Field):
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it (Qwen).

    This field must follow the fields of the experts, and removes them if no layer has experts.
    """

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the layers with experts."""
        step = given.typed("decoder_sparse_step", int, 1)
        if step < 1:
            raise given.problem("decoder_sparse_step", "is not a number of layers")
        listed = given.take("mlp_only_layers", None) is not None
        without = given.entries("mlp_only_layers", int) if listed else []
        num_layers = settings["num_layers"]
        layers = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without]
        if not layers or settings["experts"]["count"] == 0:
            return {"experts": None}
        return {"experts.layers": None if len(layers) == num_layers else tuple(layers)}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the list of layers without experts."""
        dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_QWEN_KEYS = llama_keys(vocab_size=151936, max_seq_len=32768, d_ff=22016, num_kv_heads=32)
_QWEN_WINDOWS = windows_from_layer(default=4096, first=28)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *IMPLIED,
        *implied(attention_bias=True),
        *_QWEN_KEYS,
        HEAD_DIM,
        ATTENTION_DROPOUT,
        _QWEN_WINDOWS,
        RopeParameters(),
        fixed("use_mrope", False),
    ),
    tensors=TENSORS,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *IMPLIED,
        *implied(qk_norm="head"),
        *_QWEN_KEYS,
        size("head_dim", "head_dim", 128),
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        _QWEN_WINDOWS,
        RopeParameters(),
    ),
    tensors=TENSORS,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *IMPLIED,
        *implied(**{"qk_norm": "head", "experts.scores": "softmax", "experts.router_z_loss": 0.0}),
        *llama_keys(151936, max_seq_len=32768, d_ff=6144, d_model=2048, num_layers=24, num_kv_heads=4),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        Window(default=4096, switched_by="use_sliding_window"),
        RopeParameters(),
        count("num_experts", "experts.count", 128, "num_local_experts"),
        size("num_experts_per_tok", "experts.per_token", 8),
        size("moe_intermediate_size", "experts.d_ff", 768),
        switch("norm_topk_prob", "experts.normalize", default=False),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        unread("output_router_logits"),
        SparseLayers(),
    ),
    tensors=(*TENSORS, *experts(f"{_LAYER}.mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})),
)

_GATE_UP = (f"{_BLOCK}.feed_forward.gate_proj", f"{_BLOCK}.feed_forward.up_proj")
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
        *fused(QUERY_KEY_VALUE, f"{_LAYER}.self_attn.qkv_proj"),
        *fused(_GATE_UP, f"{_LAYER}.mlp.gate_up_proj"),
        *(rule for rule in (*ATTENTION, *FEED_FORWARD) if rule.ours[0].removesuffix(".weight") not in _FUSED),
        *HEAD,
    ),
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(
        *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="width", bias=False),
        *llama_keys(vocab_size=50304, max_seq_len=2048, d_ff=11008, norm_eps=1e-5),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        RopeParameters(),
    ),
    tensors=(
        *EMBEDDING,
        *same(f"{_BLOCK}.attention_output_norm", f"{_LAYER}.post_attention_layernorm"),
        *same(f"{_BLOCK}.feed_forward_output_norm", f"{_LAYER}.post_feedforward_layernorm"),
        *ATTENTION,
        *FEED_FORWARD,
        *HEAD,
    ),
)


class ScoreDivisor(Field):
    """`query_pre_attn_scalar`, an integer; scores are divided by its root (Gemma)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns one over the root as the scale."""
        divisor = given.typed("query_pre_attn_scalar", int, 256)
        if divisor < 1:
            raise given.problem("query_pre_attn_scalar", "is not positive")
        return {"attention_scale": divisor**-0.5}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the nearest integer."""
        return {"query_pre_attn_scalar": max(1, round(min(1 / score_scale(config), 2.0**15) ** 2))}


_GEMMA_FIELDS: tuple[Field, ...] = (
    *implied(position_encoding="rope", norm="rmsnorm_zero_centered", norm_position="sandwich", bias=False),
    size("hidden_size", "d_model", 2304),
    count("num_hidden_layers", "num_layers", 26),
    size("num_attention_heads", "num_heads", 8),
    size("intermediate_size", "d_ff", 9216),
    size("num_key_value_heads", "num_kv_heads", 4, optional=True),
    size("head_dim", "head_dim", 256),
    Activation("hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}, "gelu_pytorch_tanh"),
    number("rms_norm_eps", "norm_eps", 1e-6),
    switch("tie_word_embeddings", "tie_weights", default=True),
    ATTENTION_BIAS,
    EmbeddingRoot(),
    ScoreDivisor(),
    ATTENTION_DROPOUT,
    fixed("use_bidirectional_attention", False, None),
    # transformers reads `hidden_activation` and `sliding_window` instead of these.
    unread("hidden_act", "sliding_window_size"),
)
_GEMMA_NORMS = (
    *same(f"{_BLOCK}.attention_norm", f"{_LAYER}.input_layernorm"),
    *same(f"{_BLOCK}.attention_output_norm", f"{_LAYER}.post_attention_layernorm"),
    *same(f"{_BLOCK}.feed_forward_norm", f"{_LAYER}.pre_feedforward_layernorm"),
    *same(f"{_BLOCK}.feed_forward_output_norm", f"{_LAYER}.post_feedforward_layernorm"),
)
_GEMMA_TENSORS = (*EMBEDDING, *_GEMMA_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        size("vocab_size", "vocab_size", 256000),
        context("max_position_embeddings", 8192),
        *_GEMMA_FIELDS,
        number("attn_logit_softcapping", "attention_soft_cap", 50.0, optional=True),
        number("final_logit_softcapping", "logit_soft_cap", 30.0, optional=True),
        windows_by_period(4096, 2),
        RopeParameters(),
    ),
    tensors=_GEMMA_TENSORS,
    whole_heads=True,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *implied(qk_norm="head"),
        size("vocab_size", "vocab_size", 262208),
        context("max_position_embeddings", 131072),
        *_GEMMA_FIELDS,
        Fixed("attn_logit_softcapping", (None,), "and transformers ignores this key in this family"),
        number("final_logit_softcapping", "logit_soft_cap", None, optional=True),
        windows_by_period(4096, 6, "sliding_window_pattern"),
        LayerRopeParameters(),
        # An older form of the pattern, which `layer_types` replaced.
        unread("_sliding_window_pattern"),
    ),
    tensors=_GEMMA_TENSORS,
    whole_heads=True,
)

# An export tries them in this order.
LLAMA_AND_DESCENDANTS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE)
