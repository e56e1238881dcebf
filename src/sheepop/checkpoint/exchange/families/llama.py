"""Llama, Mistral, Qwen 2 and 3: RMSNorm, gated feed-forward networks and rotary positions; and the tables they share.

Mistral has a sliding window in every layer, and Mixtral also experts. Qwen 2 has biases of queries, keys and values,
Qwen 3 norms of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

from sheepop.checkpoint.exchange.family import Family
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
    EXPERTS,
    HEAD_PAIRS,
    ROTARY_PAIRS,
    TensorRule,
    experts,
    fused,
    same,
)
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

BLOCK, LAYER = "blocks.{layer}", "model.layers.{layer}"
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
ATTENTION_DROPOUT = Dropouts(None, "attention_dropout", None)

EMBEDDING = (TensorRule(("embedding.weight",), "model.embed_tokens.weight"),)
HEAD = (*same("final_norm", "model.norm"), TensorRule(("lm_head.weight",), "lm_head.weight"))
PRE_NORMS = (
    *same(f"{BLOCK}.attention_norm", f"{LAYER}.input_layernorm"),
    *same(f"{BLOCK}.feed_forward_norm", f"{LAYER}.post_attention_layernorm"),
)
ATTENTION = tuple(
    rule
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    for rule in same(f"{BLOCK}.attention.{name}", f"{LAYER}.self_attn.{name}")
)
FEED_FORWARD = tuple(
    rule
    for name in ("gate_proj", "up_proj", "down_proj")
    for rule in same(f"{BLOCK}.feed_forward.{name}", f"{LAYER}.mlp.{name}")
)
OUTPUT_NORMS = (
    *same(f"{BLOCK}.attention_output_norm", f"{LAYER}.post_attention_layernorm"),
    *same(f"{BLOCK}.feed_forward_output_norm", f"{LAYER}.post_feedforward_layernorm"),
)
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
        *experts(f"{LAYER}.block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}),
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


class SharedExpert(Field):
    """The width of a shared expert with a gate, a multiple of that of an expert. This field must follow the latter."""

    def __init__(self, default: int) -> None:
        self._default = default

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the number of experts that it is as wide as."""
        width, unit = given.typed("shared_expert_intermediate_size", int, self._default), settings["experts"]["d_ff"]
        if width < 1 or unit < 1 or width % unit:
            raise given.problem("shared_expert_intermediate_size", f"is not a multiple of the {unit} of an expert")
        return {"experts.shared": width // unit, "experts.shared_gate": True}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the width."""
        experts = config.experts
        width = 0 if experts is None else experts.shared * (experts.d_ff or config.ffn_size)
        return {"shared_expert_intermediate_size": width}


def qwen_experts(count_: int, per_token: int, width: int, *aliases: str) -> tuple[Field, ...]:
    """Returns the keys of Qwen's experts with these defaults, except which layers have them and normalisation."""
    return (
        *implied(**{"experts.scores": "softmax", "experts.router_z_loss": 0.0}),
        count("num_experts", "experts.count", count_, *aliases),
        size("num_experts_per_tok", "experts.per_token", per_token),
        size("moe_intermediate_size", "experts.d_ff", width),
        number("router_aux_loss_coef", "experts.load_balancing_loss", 0.001),
        unread("output_router_logits"),
    )


def _every_second_layer(given: Given, num_layers: int) -> list[bool]:
    first = given.typed("max_window_layers", int, 28)
    return [layer % 2 == 0 and layer < first for layer in range(num_layers)]


QWEN_EXPERTS = experts(f"{LAYER}.mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
SHARED_EXPERT = (
    *(
        rule
        for name in ("gate_proj", "up_proj", "down_proj")
        for rule in same(f"{EXPERTS}.shared.{name}", f"{LAYER}.mlp.shared_expert.{name}")
    ),
    TensorRule((f"{EXPERTS}.shared_gate",), f"{LAYER}.mlp.shared_expert_gate.weight"),
)
NORMALIZES_EXPERTS = switch("norm_topk_prob", "experts.normalize", default=False)

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
        *implied(qk_norm="head"),
        *llama_keys(151936, max_seq_len=32768, d_ff=6144, d_model=2048, num_layers=24, num_kv_heads=4),
        HEAD_DIM,
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        Window(default=4096, switched_by="use_sliding_window"),
        RopeParameters(),
        *qwen_experts(128, 8, 768, "num_local_experts"),
        NORMALIZES_EXPERTS,
        SparseLayers(),
    ),
    tensors=(*TENSORS, *QWEN_EXPERTS),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(151936, max_seq_len=32768, d_ff=5632, d_model=2048, num_layers=24, num_heads=16, num_kv_heads=16),
        HEAD_DIM,
        switch("qkv_bias", "attention_bias", default=True),
        ATTENTION_DROPOUT,
        LayerTypes(4096, _every_second_layer, "use_sliding_window"),
        RopeParameters(),
        *qwen_experts(60, 4, 1408),
        NORMALIZES_EXPERTS,
        SharedExpert(5632),
        SparseLayers(),
    ),
    tensors=(*TENSORS, *QWEN_EXPERTS, *SHARED_EXPERT),
)
