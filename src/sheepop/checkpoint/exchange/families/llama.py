"""Llama, Mistral, Qwen 2 and 3: RMSNorm, gated feed-forward networks and rotary positions; and the tables they share.

Mistral has a sliding window in every layer, and Mixtral also experts. Qwen 2 has biases of queries, keys and values,
Qwen 3 norms of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.fields import (
    GATED_ACTIVATIONS,
    Activation,
    Dropouts,
    LayerTypes,
    Window,
    windows_from_layer,
)
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import (
    BLOCK,
    EXPERTS,
    HEAD_PAIRS,
    ROTARY_PAIRS,
    TensorRule,
    experts,
    fused,
    same,
    under,
)
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Converted,
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

LAYER = "model.layers.{layer}"
IMPLIED = implied(position_encoding="rope", norm="rmsnorm", norm_position="pre", bias=False)


def llama_keys(
    vocab_size: int,
    max_seq_len: int,
    *,
    d_ff: int,
    d_model: int = 4096,
    num_layers: int = 32,
    num_heads: int = 32,
    num_kv_heads: int | None = None,
    norm_eps: float = 1e-6,
    norm_key: str = "rms_norm_eps",
    activation: Activation = Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
    tied: bool = False,
) -> tuple[Field, ...]:
    """Returns the keys that all descendants of Llama share, except head and position keys, with these defaults."""
    return (
        size("vocab_size", "vocab_size", vocab_size),
        size("hidden_size", "d_model", d_model),
        count("num_hidden_layers", "num_layers", num_layers),
        size("num_attention_heads", "num_heads", num_heads),
        size("num_key_value_heads", "num_kv_heads", num_kv_heads, optional=True),
        context("max_position_embeddings", max_seq_len),
        size("intermediate_size", "d_ff", d_ff),
        activation,
        number(norm_key, "norm_eps", norm_eps),
        switch("tie_word_embeddings", "tie_weights", default=tied),
    )


HEAD_DIM = size("head_dim", "head_dim", None, optional=True)
ATTENTION_BIAS = switch("attention_bias", "attention_bias", "attention_output_bias", default=False)
QUERY_BIAS = switch("attention_bias", "attention_bias", default=False)
MLP_BIAS = switch("mlp_bias", "feed_forward_bias", default=False)
ATTENTION_DROPOUT = Dropouts(None, "attention_dropout", None)


def llama_fields(
    vocab_size: int, max_seq_len: int, *, head_dim: Field = HEAD_DIM, rope: Field = RopeParameters(), **sizes: Any
) -> tuple[Field, ...]:
    """Returns the fields of Llama; `sizes` are the defaults that `llama_keys` takes."""
    keys = llama_keys(vocab_size, max_seq_len, **sizes)
    return (*IMPLIED, *keys, head_dim, ATTENTION_BIAS, ATTENTION_DROPOUT, rope)


EMBEDDING = (TensorRule(("embedding.weight",), "model.embed_tokens.weight"),)
HEAD = (*same("final_norm", "model.norm"), TensorRule(("lm_head.weight",), "lm_head.weight"))
PRE_NORMS = under(BLOCK, LAYER, attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm")
ATTENTION = under(
    f"{BLOCK}.attention", f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
)
FEED_FORWARD = under(f"{BLOCK}.feed_forward", f"{LAYER}.mlp", "gate_proj", "up_proj", "down_proj")
OUTPUT_NORMS = under(
    BLOCK, LAYER,
    attention_output_norm="post_attention_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)  # fmt: skip
_GATE_UP = (f"{BLOCK}.feed_forward.gate_proj", f"{BLOCK}.feed_forward.up_proj")
FUSED_FEED_FORWARD = (
    *fused(_GATE_UP, f"{LAYER}.mlp.gate_up_proj"),
    *same(f"{BLOCK}.feed_forward.down_proj", f"{LAYER}.mlp.down_proj"),
)
# Queries and keys whose columns (2i, 2i + 1) rotate as a pair.
_PAIRED = {".q_proj": ROTARY_PAIRS, ".k_proj": ROTARY_PAIRS, ".q_norm": HEAD_PAIRS, ".k_norm": HEAD_PAIRS}
PAIRED_ATTENTION = tuple(
    replace(rule, layout=next((layout for part, layout in _PAIRED.items() if part in rule.theirs), rule.layout))
    for rule in ATTENTION
)
TENSORS = (*EMBEDDING, *PRE_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)
PAIRED_TENSORS = (*EMBEDDING, *PRE_NORMS, *PAIRED_ATTENTION, *FEED_FORWARD, *HEAD)

LLAMA = family(
    "llama",
    "LlamaForCausalLM",
    TENSORS,
    *llama_fields(32000, 2048, d_ff=11008),
    MLP_BIAS,
    # Parallelism of the training program, a marker of SmolLM2, and lengths that other programs added.
    unread("pretraining_tp", "is_llama_config", "max_sequence_length", "model_max_length"),
    unread("tokenizer_model_max_length", "tokenizer_padding_side"),
    fixed("rope_interleaved", False),
    whole_heads=True,
)

_MISTRAL = (*IMPLIED, HEAD_DIM, ATTENTION_DROPOUT)
MISTRAL = family(
    "mistral",
    "MistralForCausalLM",
    TENSORS,
    *_MISTRAL,
    *llama_keys(32000, 131072, d_ff=14336, num_kv_heads=8),
    Window(default=4096),
    RopeParameters(),
)

ROUTER_LOSS = number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001)
MIXTRAL = family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *EMBEDDING, *PRE_NORMS, *ATTENTION,
        *experts(f"{LAYER}.block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}),
        *HEAD,
    ),
    *_MISTRAL,
    *llama_keys(32000, 131072, d_ff=14336, num_kv_heads=8, norm_eps=1e-5),
    Window(default=None),
    RopeParameters(base=1_000_000.0),
    *implied(**{"experts.scores": "softmax", "experts.normalize": True, "experts.router_z_loss": 0.0}),
    count("num_local_experts", "experts.count", 8, "num_experts"),
    size("num_experts_per_tok", "experts.per_token", 2),
    ROUTER_LOSS,
    fixed("router_jitter_noise", 0.0, 0),
    unread("output_router_logits"),
)  # fmt: skip


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


def shared_expert(default: int) -> Converted:
    """Returns a field for the width of a shared expert with a gate, a multiple of that of an expert, read before."""

    def to_ours(width: int, settings: Settings) -> Settings:
        unit = settings["experts"]["d_ff"]
        if width < 1 or unit < 1 or width % unit:
            raise ValueError(f"is not a multiple of the {unit} of an expert")
        return {"experts.shared": width // unit, "experts.shared_gate": True}

    def to_theirs(config: ModelConfig) -> int:
        experts = config.experts
        return 0 if experts is None else experts.shared * (experts.d_ff or config.ffn_size)

    return Converted("shared_expert_intermediate_size", int, default, to_ours, to_theirs)


def qwen_experts(count_: int, per_token: int, width: int, *aliases: str) -> tuple[Field, ...]:
    """Returns the keys of Qwen's experts with these defaults, except which layers have them and normalisation."""
    return (
        *implied(**{"experts.scores": "softmax", "experts.router_z_loss": 0.0}),
        count("num_experts", "experts.count", count_, *aliases),
        size("num_experts_per_tok", "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.d_ff", width),
        ROUTER_LOSS,
        unread("output_router_logits"),
    )


def _every_second_layer(given: Given, num_layers: int) -> list[bool]:
    first = given.typed("max_window_layers", int, 28)
    return [layer % 2 == 0 and layer < first for layer in range(num_layers)]


QWEN_EXPERTS = experts(f"{LAYER}.mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
SHARED_EXPERT = (
    *under(f"{EXPERTS}.shared", f"{LAYER}.mlp.shared_expert", "gate_proj", "up_proj", "down_proj"),
    TensorRule((f"{EXPERTS}.shared_gate",), f"{LAYER}.mlp.shared_expert_gate.weight"),
)
NORMALIZES_EXPERTS = switch("norm_topk_prob", "experts.normalize", default=False)

_QWEN_WINDOWS = windows_from_layer(default=4096, first=28)

QWEN2 = family(
    "qwen2",
    "Qwen2ForCausalLM",
    TENSORS,
    *IMPLIED,
    *implied(attention_bias=True),
    *llama_keys(151936, 32768, d_ff=22016, num_kv_heads=32),
    HEAD_DIM,
    ATTENTION_DROPOUT,
    _QWEN_WINDOWS,
    RopeParameters(),
    fixed("use_mrope", False),
)

HEADS_OF_128 = size("head_dim", "head_dim", 128)
QWEN3 = family(
    "qwen3",
    "Qwen3ForCausalLM",
    TENSORS,
    *llama_fields(151936, 32768, d_ff=22016, num_kv_heads=32, head_dim=HEADS_OF_128),
    *implied(qk_norm="head"),
    _QWEN_WINDOWS,
)

QWEN3_MOE = family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*TENSORS, *QWEN_EXPERTS),
    *llama_fields(151936, 32768, d_ff=6144, d_model=2048, num_layers=24, num_kv_heads=4),
    *implied(qk_norm="head"),
    Window(default=4096, switched_by="use_sliding_window"),
    *qwen_experts(128, 8, 768, "num_local_experts"),
    NORMALIZES_EXPERTS,
    SparseLayers(),
)

QWEN2_MOE = family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (*TENSORS, *QWEN_EXPERTS, *SHARED_EXPERT),
    *IMPLIED,
    *llama_keys(151936, 32768, d_ff=5632, d_model=2048, num_layers=24, num_heads=16, num_kv_heads=16),
    HEAD_DIM,
    switch("qkv_bias", "attention_bias", default=True),
    ATTENTION_DROPOUT,
    LayerTypes(4096, _every_second_layer, "use_sliding_window"),
    RopeParameters(),
    *qwen_experts(60, 4, 1408),
    NORMALIZES_EXPERTS,
    shared_expert(5632),
    SparseLayers(),
)
