"""Families with latent attention or grouped routing: DeepSeek-V2 and V3, Kimi K2, GLM-4.5 to 4.7, MiniCPM 3.

Kimi K2 is DeepSeek-V3 with other sizes. GLM-4.5 routes like DeepSeek-V3, but has ordinary attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    IMPLIED,
    LAYER,
    PRE_NORMS,
    QUERY_BIAS,
    QWEN_EXPERTS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import BLOCK, EXPERTS, INTERLEAVED, RotaryLast, TensorRule, same, under
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Converted, Field, Settings, count, fixed, implied, number, size, switch, unread
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class LatentWidths(Field):
    """The widths of a query's columns without and with rotation, and two keys that are derived from them."""

    nope: int = 128
    rope: int = 64

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the width of a head and of its rotated part."""
        nope, rope = given.typed("qk_nope_head_dim", int, self.nope), given.typed("qk_rope_head_dim", int, self.rope)
        for name, derived in (("head_dim", rope), ("qk_head_dim", nope + rope)):
            if given.typed(name, int, None, optional=True) not in (None, derived):
                raise given.problem(name, f"differs from the {derived} that follow from the widths of the heads' parts")
        return {"head_dim": nope + rope, "latent_attention.rope_head_dim": rope}

    def write(self, config: ModelConfig) -> Settings:
        """Returns both widths."""
        shared = 0 if config.latent_attention is None else config.latent_attention.rope_head_dim
        return {"qk_nope_head_dim": config.head_size - shared, "qk_rope_head_dim": shared}


def _value_width(width: int | None, settings: Settings) -> Settings:
    return {"value_head_dim": settings["d_model"] // max(1, settings["num_heads"]) if width is None else width}


def _latent(kv_rank: int, q_rank: int, value_width: int | None, nope: int, rope: int = 64) -> tuple[Field, ...]:
    """Returns the keys of latent attention with these defaults; its norms have an epsilon of their own."""
    return (
        *implied(**{"latent_attention.norm_eps": 1e-6}),
        size("kv_lora_rank", "latent_attention.kv_rank", kv_rank),
        size("q_lora_rank", "latent_attention.q_rank", q_rank, optional=True),
        LatentWidths(nope, rope),
        # The width of a value head; null is the width of the model over the number of heads.
        Converted("v_head_dim", int, value_width, _value_width, lambda config: config.value_size),
        switch("attention_bias", "attention_bias", "attention_output_bias", default=False),
        ATTENTION_DROPOUT,
        RopeParameters(scales_scores=True),
    )


@dataclass(frozen=True)
class Groups(Field):
    """`n_group` groups of experts, of which a token uses `topk_group`, those with the best sums of `top` scores.

    `per_token` is the default of the experts of a token; null, which transformers cannot compute, leaves it out.
    """

    groups: int | None
    kept: int | None
    per_token: int | None
    top: int = 2

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the numbers of groups and experts."""
        groups = given.typed("n_group", int, self.groups, optional=True)
        kept = given.typed("topk_group", int, self.kept, optional=True)
        per_token = given.typed("num_experts_per_tok", int, self.per_token, optional=self.per_token is None)
        found = {} if per_token is None else {"experts.per_token": per_token}
        if groups in (None, 1):
            return {**found, "experts.groups": 1}
        return {
            **found, "experts.groups": groups, "experts.groups_per_token": kept, "experts.group_top": self.top,
        }  # fmt: skip

    def write(self, config: ModelConfig) -> Settings:
        """Returns the numbers of groups and experts, if there are experts."""
        found = config.experts
        if found is None:
            return {}
        numbers = {"n_group": found.groups, "topk_group": found.groups_per_token}
        return {**numbers, "num_experts_per_tok": found.per_token}


_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


class GroupsByMethod(Groups):
    """Groups that `topk_method` turns on (DeepSeek-V2)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the numbers of groups and experts."""
        method = given.typed("topk_method", str, _GREEDY)
        if method not in (_GREEDY, _GROUPED):
            raise given.problem("topk_method", f"is neither {_GREEDY} nor {_GROUPED}")
        found = super().read(given, settings)
        return {name: value for name, value in found.items() if method == _GROUPED or "group" not in name}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the method too."""
        grouped = config.experts is not None and config.experts.groups > 1
        return {**super().write(config), "topk_method": _GROUPED if grouped else _GREEDY}


@dataclass(frozen=True)
class DenseLayers(Field):
    """How many first layers have no experts, or with `listed` the kind of each layer.

    This field must follow the fields of the experts, and removes them if no layer has experts.
    """

    first: int
    listed: bool = False
    key: str = "first_k_dense_replace"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the layers with experts."""
        num_layers, first = settings["num_layers"], self.first
        if not self.listed:
            first = given.typed(self.key, int, first)
        kinds = ["dense" if layer < first else "sparse" for layer in range(num_layers)]
        if self.listed and given.take("mlp_layer_types", None) is not None:
            kinds = given.entries("mlp_layer_types", str)
            if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
                raise given.problem("mlp_layer_types", f"is not dense or sparse for each of {num_layers} layers")
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
        if not layers:
            return {"experts": None}
        return {"experts.layers": None if len(layers) == num_layers else layers}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the number of layers before the first with experts, or the kinds."""
        sparse = [config.has_experts(layer) for layer in range(config.num_layers)]
        if self.listed:
            return {"mlp_layer_types": ["sparse" if has else "dense" for has in sparse]}
        return {self.key: sparse.index(True) if any(sparse) else config.num_layers}


def _mixture(
    number_of: int,
    alias: str,
    inner: int,
    shared: int,
    dense: DenseLayers,
    scale: float,
    scores: str,
    groups: Groups,
    *normalising: Field,
) -> tuple[Field, ...]:
    """Returns the keys of the experts with these defaults; `normalising` are those of their weights."""
    return (
        *implied(**{"experts.scores": scores, "experts.router_z_loss": 0.0, "experts.load_balancing_loss": 0.0}),
        count("n_routed_experts", "experts.count", number_of, alias),
        size("moe_intermediate_size", "experts.d_ff", inner),
        count("n_shared_experts", "experts.shared", shared),
        number("routed_scaling_factor", "experts.scale", scale),
        groups,
        *normalising,
        dense,
        # Losses and parallelism of training, and the network's own further predictions.
        unread(
            "output_router_logits", "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size",
            "num_nextn_predict_layers", "num_mtp_layers",
        ),
        # Of the program code that comes with some models.
        fixed("moe_layer_freq", 1),
        fixed("scoring_func", scores),
    )  # fmt: skip


class ScaledBranches(Field):
    """Factors of embeddings, of residual branches by the depth, and of logits by the width (MiniCPM)."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the factors; without a key for the depth or the width they are 1."""
        depth = given.typed("scale_depth", float, 1.4, optional=True)
        width = given.typed("dim_model_base", int, 256, optional=True)
        return {
            "embedding_scale": given.typed("scale_emb", float, 12.0),
            "residual_scale": 1.0 if depth is None else depth / max(1, settings["num_layers"]) ** 0.5,
            "logit_scale": 1.0 if width is None else width / max(1, settings["d_model"]),
        }

    def write(self, config: ModelConfig) -> Settings:
        """Returns the factors times the root of the depth and the width, which must be whole."""
        return {
            "scale_emb": config.embedding_scale,
            "scale_depth": config.residual_scale * config.num_layers**0.5,
            "dim_model_base": round(config.output_scale * config.d_model),
        }


def _attention(paired: bool = True) -> tuple[TensorRule, ...]:
    ours, theirs = f"{BLOCK}.attention", f"{LAYER}.self_attn"
    heads, one = RotaryLast(paired=paired), RotaryLast(paired=paired, one_head=True)
    return (
        *under(ours, theirs, "o_proj", q_latent_proj="q_a_proj", q_latent_norm="q_a_layernorm"),
        TensorRule((f"{ours}.q_proj.weight",), f"{theirs}.q_proj.weight", heads),
        TensorRule((f"{ours}.q_proj.weight",), f"{theirs}.q_b_proj.weight", heads, f"{ours}.q_latent_proj.weight"),
        *same(f"{ours}.kv_latent_proj", f"{theirs}.kv_a_proj_with_mqa", layout=one),
        *same(f"{ours}.kv_latent_norm", f"{theirs}.kv_a_layernorm"),
        TensorRule((f"{ours}.k_proj.weight", f"{ours}.v_proj.weight"), f"{theirs}.kv_b_proj.weight", INTERLEAVED),
    )


_MIXTURE = (
    *FEED_FORWARD, *QWEN_EXPERTS,
    *under(f"{EXPERTS}.shared", f"{LAYER}.mlp.shared_experts", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
_BALANCE = TensorRule((f"{EXPERTS}.router.balance",), f"{LAYER}.mlp.gate.e_score_correction_bias")
_TENSORS = (*EMBEDDING, *PRE_NORMS, *_attention(), *_MIXTURE, *HEAD)
_NORMALIZE = switch("norm_topk_prob", "experts.normalize", default=True)

DEEPSEEK_V2 = family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _TENSORS,
    *IMPLIED,
    *llama_keys(102400, 2048, d_ff=11008),
    *_latent(kv_rank=512, q_rank=1536, value_width=128, nope=128),
    *_mixture(
        64, "num_experts", 1407, 2, DenseLayers(0), 1.0, "softmax", GroupsByMethod(None, None, None, 1),
        *implied(**{"experts.normalize": False}), fixed("norm_topk_prob", False, None),
    ),
    fixed("mlp_bias", False),
    whole_heads=True,
)  # fmt: skip

DEEPSEEK_V3 = family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (*_TENSORS, _BALANCE),
    *IMPLIED,
    *llama_keys(129280, 4096, d_ff=18432, d_model=7168, num_layers=61, num_heads=128, num_kv_heads=128),
    *_latent(kv_rank=512, q_rank=1536, value_width=128, nope=128),
    *_mixture(256, "num_local_experts", 2048, 1, DenseLayers(3), 2.5, "sigmoid", Groups(8, 4, 8), _NORMALIZE),
    fixed("rope_interleave", True),
    fixed("topk_method", "noaux_tc"),
    aliases=("kimi_k2",),
    further_layers=True,
)

GLM4_MOE_LITE = family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    (*_TENSORS, _BALANCE),
    *IMPLIED,
    *llama_keys(154880, 202752, d_ff=10240, d_model=2048, num_layers=47, num_heads=20, num_kv_heads=20, norm_eps=1e-5),
    *_latent(kv_rank=512, q_rank=768, value_width=256, nope=192),
    *_mixture(
        64, "num_local_experts", 1536, 1, DenseLayers(1, listed=True), 1.8, "sigmoid", Groups(1, 1, 4), _NORMALIZE
    ),
    fixed("rope_interleave", True),
    further_layers=True,
)

GLM4_MOE = family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (*EMBEDDING, *PRE_NORMS, *ATTENTION, *_MIXTURE, _BALANCE, *HEAD),
    *IMPLIED,
    *llama_keys(151552, 131072, d_ff=10944, num_layers=46, num_heads=96, num_kv_heads=8, norm_eps=1e-5),
    # All published files have this key; without it transformers' default would rotate an odd number of columns.
    size("head_dim", "head_dim", 128),
    Converted(
        "use_qk_norm", bool, False,
        lambda normalises, _: {"qk_norm": "head" if normalises else None},
        lambda config: config.qk_norm is not None,
    ),
    QUERY_BIAS, ATTENTION_DROPOUT,
    RopeParameters(fraction=0.5),
    *_mixture(128, "num_local_experts", 1408, 1, DenseLayers(1), 1.0, "sigmoid", Groups(1, 1, 8), _NORMALIZE),
    further_layers=True,
)  # fmt: skip

MINICPM3 = family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    (*EMBEDDING, *PRE_NORMS, *_attention(paired=False), *FEED_FORWARD, *HEAD),
    *IMPLIED,
    *llama_keys(
        73448, 32768, d_ff=6400, d_model=2560, num_layers=62, num_heads=40, num_kv_heads=40, norm_eps=1e-5, tied=True,
    ),
    *_latent(kv_rank=256, q_rank=768, value_width=None, nope=64, rope=32),
    ScaledBranches(),
    switch("mlp_bias", "feed_forward_bias", default=False),
    number("initializer_range", "initial_std", 0.1),
    unread("pretraining_tp"),
)  # fmt: skip
