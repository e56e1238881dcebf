"""Families that change Llama in a few points: Granite, SmolLM 3, EXAONE 4, GLM 4, OLMo, Phi-3, gpt-oss and others.

Granite and OLMo have mixtures of experts, too.

MiniCPM has factors of embeddings, sublayers and logits (Hu et al. 2024, "MiniCPM", section 3.1, table 3). Its
configuration comes with program code, for which its table stands. transformers has no class for it, so a model is
exported as Granite, which has the same factors.
"""

from __future__ import annotations

from sheepop.checkpoint.exchange.families import llama
from sheepop.checkpoint.exchange.families.llama import ATTENTION_BIAS, ATTENTION_DROPOUT, HEAD_DIM, IMPLIED, LAYER
from sheepop.checkpoint.exchange.family import family
from sheepop.checkpoint.exchange.fields import (
    PLAIN_ACTIVATIONS,
    Activation,
    Dropouts,
    LayerTypes,
    Window,
    windows_by_period,
)
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.exchange.tensor_rules import (
    BLOCK,
    EXPERTS,
    JOINED_EXPERTS,
    QUERY_KEY_VALUE,
    STACKED_EXPERTS,
    TensorRule,
    fused,
    router,
    same,
)
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Converted,
    Field,
    Refused,
    Settings,
    all_but_every,
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

_GRANITE = (
    *llama.llama_fields(32000, 2048, d_ff=11008),
    number("embedding_multiplier", "embedding_scale", 1.0),
    number("residual_multiplier", "residual_scale", 1.0),
    Converted("attention_multiplier", float, 1.0, lambda factor, _: {"attention_scale": factor}, score_scale),
    output_scale("logits_scaling", 1.0, divides=True),
)
GRANITE = family("granite", "GraniteForCausalLM", llama.TENSORS, *_GRANITE, llama.MLP_BIAS)

_GRANITE_MIXTURE = f"{LAYER}.block_sparse_moe"
GRANITE_MOE = family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS, *llama.ATTENTION,
        *router(f"{_GRANITE_MIXTURE}.router.layer"),
        TensorRule(
            tuple(f"{EXPERTS}.experts.{name}_proj" for name in ("gate", "up")),
            f"{_GRANITE_MIXTURE}.input_linear.weight",
            JOINED_EXPERTS,
        ),
        TensorRule((f"{EXPERTS}.experts.down_proj",), f"{_GRANITE_MIXTURE}.output_linear.weight"),
        *llama.HEAD,
    ),
    *_GRANITE,
    *implied(**{"experts.scores": "softmax", "experts.normalize": True, "experts.router_z_loss": 0.0}),
    count("num_local_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
    llama.ROUTER_LOSS,
    unread("output_router_logits"),
)  # fmt: skip


class _Factors(Field):
    """`scale_depth`, over the root of the layers, and `dim_model_base`, over the width; must follow the sizes."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the factors of sublayers and logits."""
        depth, width = given.typed("scale_depth", float, 1.0), given.typed("dim_model_base", int, 1)
        for name, value in (("scale_depth", depth), ("dim_model_base", width)):
            if value <= 0:
                raise given.problem(name, "is not a factor above 0")
        layers, d_model = max(1, settings["num_layers"]), max(1, settings["d_model"])
        return {"residual_scale": depth / layers**0.5, "logit_scale": width / d_model}


MINICPM = family(
    "minicpm",
    "MiniCPMForCausalLM",
    llama.TENSORS,
    *without(llama.llama_fields(32000, 2048, d_ff=11008, tied=True), "head_dim"),
    number("scale_emb", "embedding_scale", 1.0),
    _Factors(),
    Refused("num_experts", "gives the model experts, which SheepOp does not read in this family"),
    Refused("sparse_config", "lets long texts see only some keys, which SheepOp does not support"),
    # Parallelism of the training program, and a factor of another model that guesses tokens for this one.
    unread("pretraining_tp", "mup_denominator"),
)


def _rotating(given: Given, num_layers: int) -> list[bool]:
    """Returns for each layer whether it rotates: `no_rope_layers` is 1 where it does (SmolLM 3)."""
    period = given.typed("no_rope_layer_interval", int, 4)
    if given.take("no_rope_layers", None) is None:
        if period < 1:
            raise given.problem("no_rope_layer_interval", "is not a number of layers")
        return all_but_every(period, num_layers)
    found = given.entries("no_rope_layers", int)
    if len(found) < num_layers:
        raise given.problem("no_rope_layers", f"has {len(found)} entries for {num_layers} layers")
    return [bool(entry) for entry in found[:num_layers]]


class RotatingLayers(LayerTypes):
    """Windows that may be in the layers without rotation (SmolLM 3)."""

    def write(self, config: ModelConfig) -> Settings:
        """Returns the windows, and a number for each layer: 1 if it rotates."""
        rotating = [int(config.rotates(layer)) for layer in range(config.num_layers)]
        return {**super().write(config), "no_rope_layers": rotating}


SMOLLM3 = family(
    "smollm3",
    "SmolLM3ForCausalLM",
    llama.TENSORS,
    *llama.llama_fields(
        128256, 32768, d_ff=11008, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=4, tied=True,
        rope=RopeParameters(base=2_000_000.0),
    ),
    llama.MLP_BIAS,
    RotatingLayers(
        None,
        lambda given, num_layers: [not rotates for rotates in _rotating(given, num_layers)],
        "use_sliding_window",
        lambda given, window, slides: _rotating(given, len(slides)),
    ),
    # Of the published files; no version reads it in this family.
    unread("max_window_layers"),
)  # fmt: skip


def _exaone_windows(given: Given, num_layers: int) -> list[bool]:
    if given.take("sliding_window", 4096) is None or given.take("layer_types", None) is not None:
        given.take("sliding_window_pattern", None)
        return [False] * num_layers
    period = given.typed("sliding_window_pattern", int, 4)
    if period < 1:
        raise given.problem("sliding_window_pattern", "is not a number of layers")
    return all_but_every(period, num_layers)


class RotatingWindows(LayerTypes):
    """Only the layers with a window rotate if some layers have one; otherwise all layers rotate (EXAONE 4)."""

    def write(self, config: ModelConfig) -> Settings:
        """Returns the windows; null if there are none, since then all layers rotate."""
        return {**super().write(config), "sliding_window": config.sliding_window}


_OUTPUT_NORM_TENSORS = (*llama.EMBEDDING, *llama.OUTPUT_NORMS, *llama.ATTENTION, *llama.FEED_FORWARD, *llama.HEAD)

EXAONE4 = family(
    "exaone4",
    "Exaone4ForCausalLM",
    _OUTPUT_NORM_TENSORS,
    *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="head", bias=False),
    *llama.llama_keys(102400, 2048, d_ff=16384, num_kv_heads=32, norm_eps=1e-5),
    HEAD_DIM,
    ATTENTION_DROPOUT,
    RotatingWindows(
        4096, _exaone_windows,
        rotation=lambda given, window, slides: slides if window is not None else [True] * len(slides),
    ),
    RopeParameters(),
)  # fmt: skip

# Norms only after the sublayers, and over the whole width of queries and keys.
_OLMO = (
    *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="width", bias=False),
    *llama.llama_keys(50304, 2048, d_ff=11008, norm_eps=1e-5),
    HEAD_DIM, ATTENTION_BIAS, ATTENTION_DROPOUT,
)  # fmt: skip
OLMO2 = family("olmo2", "Olmo2ForCausalLM", _OUTPUT_NORM_TENSORS, *_OLMO, RopeParameters())
OLMO3 = family(
    "olmo3",
    "Olmo3ForCausalLM",
    _OUTPUT_NORM_TENSORS,
    *_OLMO,
    windows_by_period(4096, 4),
    LayerRopeParameters(base=500_000.0, sliding_base=500_000.0, sliding_key=None),
)

# Norms before the sublayers, and over the whole width of queries and keys; experts in every layer.
OLMOE = family(
    "olmoe",
    "OlmoeForCausalLM",
    (*llama.EMBEDDING, *llama.PRE_NORMS, *llama.ATTENTION, *llama.QWEN_EXPERTS, *llama.HEAD),
    # The norms are as wide as the model, so heads have no other width.
    *without(
        llama.llama_fields(50304, 4096, d_ff=2048, d_model=2048, num_layers=16, num_heads=16, norm_eps=1e-5), "head_dim"
    ),
    *implied(**{"qk_norm": "width", "experts.scores": "softmax", "experts.router_z_loss": 0.0}),
    count("num_experts", "experts.count", 64, "num_local_experts"),
    size("num_experts_per_tok", "experts.per_token", 8),
    number("router_aux_loss_coef", "experts.load_balancing_loss", 0.01),
    llama.NORMALIZES_EXPERTS,
    fixed("clip_qkv", None),
    unread("output_router_logits"),
    whole_heads=True,
)

GLM4 = family(
    "glm4",
    "Glm4ForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS,
        *same(f"{BLOCK}.attention_output_norm", f"{LAYER}.post_self_attn_layernorm"),
        *same(f"{BLOCK}.feed_forward_output_norm", f"{LAYER}.post_mlp_layernorm"),
        *llama.PAIRED_ATTENTION, *llama.FUSED_FEED_FORWARD, *llama.HEAD,
    ),
    *implied(position_encoding="rope", norm="rmsnorm", norm_position="sandwich", bias=False),
    *llama.llama_keys(151552, 131072, d_ff=13696, num_layers=40, num_kv_heads=2, norm_eps=1.5625e-07),
    size("head_dim", "head_dim", 128),
    switch("attention_bias", "attention_bias", default=True),
    ATTENTION_DROPOUT,
    RopeParameters(fraction=0.5),
)  # fmt: skip

SEED_OSS = family(
    "seed_oss",
    "SeedOssForCausalLM",
    llama.TENSORS,
    *IMPLIED,
    *llama.llama_keys(155136, 524288, d_ff=27648, num_layers=64, num_heads=80, num_kv_heads=8),
    size("head_dim", "head_dim", 128, optional=True),
    switch("attention_bias", "attention_bias", default=True),
    switch("attention_out_bias", "attention_output_bias", default=False),
    llama.MLP_BIAS,
    Dropouts(None, "attention_dropout", "residual_dropout", default=0.1),
    RopeParameters(),
    unread("pretraining_tp"),
)

_SQUARED = Activation("hidden_act", PLAIN_ACTIVATIONS, "relu2")
ARCEE = family(
    "arcee",
    "ArceeForCausalLM",
    llama.TENSORS,
    *llama.llama_fields(32000, 4096, d_ff=18432, d_model=2560, norm_eps=1e-5, activation=_SQUARED),
    llama.MLP_BIAS,
    whole_heads=True,
)

ERNIE4_5 = family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    llama.PAIRED_TENSORS,
    *IMPLIED,
    *implied(dropout=0.0),
    *llama.llama_keys(
        103424, 131072,
        d_ff=3072,
        d_model=1024,
        num_layers=18,
        num_heads=16,
        num_kv_heads=2,
        norm_eps=1e-5,
        tied=True,
    ),
    size("head_dim", "head_dim", 128, optional=True),
    switch("use_bias", "attention_bias", "attention_output_bias", "feed_forward_bias", default=False),
    RopeParameters(base=500_000.0),
)  # fmt: skip

# Fused are queries, keys and values, and gate and up projection.
PHI3 = family(
    "phi3",
    "Phi3ForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS,
        *fused(QUERY_KEY_VALUE, f"{LAYER}.self_attn.qkv_proj"),
        *same(f"{BLOCK}.attention.o_proj", f"{LAYER}.self_attn.o_proj"),
        *llama.FUSED_FEED_FORWARD, *llama.HEAD,
    ),
    *IMPLIED,
    *llama.llama_keys(32064, 4096, d_ff=8192, d_model=3072, norm_eps=1e-5),
    HEAD_DIM,
    Window(default=None),
    Dropouts("embd_pdrop", "attention_dropout", "resid_pdrop"),
    RopeParameters(fraction=1.0, scalings=("longrope",), original=4096),
    *(fixed(name, False) for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
    # Keys of the program code of Phi-4-mini, at values without an effect.
    fixed("full_attn_mod", 1),
    fixed("interpolate_factor", 1),
)  # fmt: skip

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# Experts with biases and a clamped SwiGLU, sinks, windows in every second layer.
GPT_OSS = family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *llama.EMBEDDING, *llama.PRE_NORMS, *llama.ATTENTION,
        TensorRule((f"{BLOCK}.attention.sinks",), f"{LAYER}.self_attn.sinks"),
        *router(f"{LAYER}.mlp.router"),
        *(
            TensorRule(
                tuple(f"{EXPERTS}.experts.{name}_{kind}" for name in names),
                f"{LAYER}.mlp.experts.{theirs}{suffix}",
                STACKED_EXPERTS,
            )
            for names, theirs in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj"))
            for kind, suffix in (("proj", ""), ("bias", "_bias"))
        ),
        *llama.HEAD,
    ),
    *IMPLIED,
    *implied(feed_forward_bias=True, attention_sinks=True, activation="swiglu_clamped"),
    *implied(**{"experts.scores": "softmax", "experts.normalize": True}),
    *implied(**{"experts.router_bias": True, "experts.router_z_loss": 0.0}),
    *without(
        llama.llama_keys(
            201088, 131072, d_ff=2880, d_model=2880, num_layers=36, num_heads=64, num_kv_heads=8, norm_eps=1e-5,
        ),
        "hidden_act",
    ),
    size("head_dim", "head_dim", 64, optional=True),
    switch("attention_bias", "attention_bias", "attention_output_bias", default=True),
    ATTENTION_DROPOUT,
    fixed("hidden_act", "silu"),
    fixed("swiglu_alpha", 1.702),
    fixed("swiglu_limit", 7.0, 7),
    count("num_local_experts", "experts.count", 128, "num_experts"),
    size("num_experts_per_tok", "experts.per_token", 4),
    llama.ROUTER_LOSS,
    unread("output_router_logits"),
    windows_by_period(128, 2),
    RopeParameters(base=150_000.0, missing=_YARN),
)  # fmt: skip
