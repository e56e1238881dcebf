"""Qwen 2 (biases of queries, keys and values), Qwen 3 (norms of queries and keys) and Qwen 3 with experts."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    HEAD_DIM,
    IMPLIED,
    TENSORS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import Window, windows_from_layer
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import experts
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Field, Settings, count, fixed, implied, number, size, switch, unread
from sheepop.model.config import ModelConfig


class SparseLayers(Field):
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it (Qwen).

    This field must follow the fields of the experts, and removes them if no layer has experts.
    """

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the layers with experts."""
        step = given.typed("decoder_sparse_step", int, 1)
        if step < 1:
            raise given.problem("decoder_sparse_step", "is not a number of layers")
        without = set(given.entries("mlp_only_layers", int, []) if given.has("mlp_only_layers") else ())
        num_layers = settings["num_layers"]
        layers = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without]
        if not layers or settings["experts"]["count"] == 0:
            return {"experts": None}
        return {"experts.layers": None if len(layers) == num_layers else tuple(layers)}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the list of layers without experts."""
        dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_KEYS = llama_keys(vocab_size=151936, max_seq_len=32768, d_ff=22016, num_kv_heads=32)
_WINDOWS = windows_from_layer(default=4096, first=28)
_PLACE = "model.layers.{layer}.mlp"

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *IMPLIED,
        *implied(attention_bias=True),
        *_KEYS,
        HEAD_DIM,
        ATTENTION_DROPOUT,
        _WINDOWS,
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
        *_KEYS,
        size("head_dim", "head_dim", 128),
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        _WINDOWS,
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
    tensors=(
        *TENSORS,
        *experts(
            f"{_PLACE}.gate",
            f"{_PLACE}.experts.{{expert}}",
            {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        ),
    ),
)
