"""The network's configuration subtree, resolved at validation: preset first, then explicit keys, then derived sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config
from sheepop.core.names import Names
from sheepop.model.attention.features import BACKEND_FEATURES, FEATURES
from sheepop.model.presets import PRESETS
from sheepop.model.rotary_scaling import RotaryScaling

Architecture = Literal["decoder", "encoder_decoder"]
PositionEncoding = Literal["sinusoidal", "learned", "rope", "alibi", "none"]
NormKind = Literal["layernorm", "rmsnorm", "rmsnorm_zero_centered"]
NormPosition = Literal["pre", "post", "sandwich", "output"]
QueryKeyNorm = Literal["head", "width"]
ACTIVATION_NAMES = Names("relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh")
Activation = Annotated[str, ACTIVATION_NAMES]
Backend = Literal["auto", "sdpa", "flex", "eager"]
Initialization = Literal[
    "gpt2",
    "normal",
    "xavier_uniform",
    "xavier_normal",
    "fan_in_uniform",
    "fan_in_normal",
    "he",
    "mup",
]
GATED = {"swiglu", "geglu", "geglu_tanh"}
_WITH_STD = frozenset({"gpt2", "normal", "mup"})
# Strict: "256", 256.0 and true are not sizes, and the derived sizes below need real integers. Bounded, because a
# configuration may come from a file of someone else's.
_LARGEST = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=_LARGEST, strict=True)]
LayerCount = Annotated[int, Field(ge=1, le=10_000, strict=True)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)]


class ExpertsConfig(Config):
    """A mixture of experts in place of the feed-forward network of some layers (Shazeer et al. 2017)."""

    count: Annotated[int, Field(ge=2, le=2**16, strict=True)]
    """Experts in a layer."""
    per_token: PositiveInt = 2
    """Experts that the router chooses for each token; at most `count`."""
    d_ff: PositiveInt | None = None
    """Width of one expert; `null` is `model.d_ff`."""
    shared: Annotated[int, Field(ge=0, le=2**16, strict=True)] = 0
    """Experts that every token passes through in addition to those chosen."""
    layers: Layers | None = None
    """The layers that have experts, counted from 0; `null` is all."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits: a `softmax` over the experts, or a `sigmoid` for each."""
    normalize: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    load_balancing_loss: float = Field(0.01, ge=0.0)
    """Coefficient of the loss that evens out the loads (Fedus et al. 2021, equation 4)."""
    router_z_loss: float = Field(0.001, ge=0.0)
    """Coefficient of the loss that keeps the router's logits small (Zoph et al. 2022, equation 5)."""
    bias_update_rate: float = Field(0.0, ge=0.0)
    """Step by which the router's biases move towards even loads (Wang et al. 2024); 0 leaves them at 0."""

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        if self.per_token > self.count:
            raise ValueError(f"experts.per_token = {self.per_token} exceeds experts.count = {self.count}")
        return self


class NgramConfig(Config):
    """Vectors for the last tokens together, looked up by their hash and added to the embedding of the last one.

    They cost no products, and hold what a small network would spend its layers on (Pagnoni et al. 2024, section 3.2.1).
    """

    orders: Annotated[tuple[Annotated[int, Field(ge=2, le=8, strict=True)], ...], Field(min_length=1)] = (2, 3)
    """How many tokens are taken together: each number has its own table of vectors."""
    rows: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] = 65_536
    """Vectors in each table; where there are more n-grams than rows, some share one."""

    @model_validator(mode="after")
    def _check(self) -> NgramConfig:
        if list(self.orders) != sorted(set(self.orders)):
            raise ValueError(f"orders = {list(self.orders)}: give each number once, the smallest first")
        return self


class ModelConfig(Config):
    """Sizes and choices of a transformer. What is left out is derived and written back."""

    preset: str | None = None
    """A named size; every other key given beside it wins over the preset's value; `null` is none."""
    architecture: Architecture = "decoder"
    """`decoder`, a language model, or `encoder_decoder`, which reads a source and writes a target."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; `null` is the tokenizer's size, and a smaller number than that is refused."""
    d_model: PositiveInt = 256
    """Width of the vectors that flow through the network."""
    num_layers: LayerCount = 6
    """Number of blocks; of an `encoder_decoder`, of its decoder."""
    num_encoder_layers: LayerCount | None = None
    """Blocks of the encoder of an `encoder_decoder`; `null` is `num_layers`."""
    num_heads: PositiveInt = 8
    """Query heads of each attention layer."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads, which must divide `num_heads`; `null` is `num_heads` (multi-head attention)."""
    head_dim: PositiveInt | None = None
    """Width of one head of queries and keys; `null` is `d_model / num_heads`, which must then be whole."""
    value_head_dim: PositiveInt | None = None
    """Width of one head of values; `null` is `head_dim`."""
    d_ff: PositiveInt | None = None
    """Width of the feed-forward layer; `null` is 4 `d_model`, for gated activations 8/3 `d_model` up to a multiple
    of 32."""
    max_seq_len: PositiveInt = 256
    """The context: the most tokens that the network can look at."""

    ngrams: NgramConfig | None = None
    """Vectors of hashed n-grams beside those of tokens; `null` is none."""

    position_encoding: PositionEncoding = "sinusoidal"
    """How positions enter; `rope` is rotary, `alibi` a bias of the scores by distance."""
    position_base: float = Field(10000.0, gt=1.0, le=1e15)
    """The 10000 of the sinusoids and of the rotary angles."""
    rotary_fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Of `rope`: the share of each head's columns that is rotated."""
    rotary_scaling: RotaryScaling | None = None
    """Of `rope`: how angles are changed for a longer context; `null` leaves them unchanged."""
    sliding_position_base: float | None = Field(None, gt=1.0, le=1e15)
    """Of `rope`: the base of layers with a sliding window, whose angles are then not scaled; `null`: as in all
    others."""
    embedding_scale: float | None = Field(None, gt=0.0, le=1e6)
    """Multiplies the embeddings; `null` is the root of `d_model` under `sinusoidal` positions (under `mup` that of
    `mup_base_d_model`), otherwise 1."""
    embedding_norm: bool = False
    """A norm right after the embedding."""

    norm: NormKind = "layernorm"
    """The kind of norm; the scale of `rmsnorm_zero_centered` is one more than its weight."""
    norm_position: NormPosition = "pre"
    """Where norms stand; `pre`: x + f(norm(x)); `post`: norm(x + f(x)); `sandwich`: x + norm(f(norm(x))); `output`:
    x + norm(f(x))."""
    norm_eps: float = Field(1e-5, gt=0.0)
    """Added under the root of the norm, to avoid division by zero."""
    norm_bias: bool | None = None
    """Whether `layernorm` has a bias; `null` is `bias`."""
    final_norm: bool | None = None
    """A norm before the output projection; `null`: unless `norm_position` is `post`."""
    qk_norm: QueryKeyNorm | None = None
    """A norm of queries and keys, over each `head` or over the `width` of all heads together; `null` is none."""

    activation: Activation = "gelu"
    """Of the feed-forward layer; `gelu_tanh` is an approximation, `swiglu`, `geglu` and `geglu_tanh` have a gate."""
    feed_forward_bias: bool | None = None
    """Biases of the feed-forward layer; `null` is `bias`."""
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of the feed-forward layer; `null` is none."""
    parallel_residual: bool = False
    """Both sublayers read the same vectors, and their outputs are added: x + attention(norm(x)) +
    feed_forward(norm'(x))."""

    short_convolution: Annotated[int, Field(ge=2, le=16, strict=True)] | None = None
    """How many tokens, including its own, each channel of queries, keys and values is mixed over before attention;
    `null` is none."""
    attention_bias: bool | None = None
    """Biases of queries, keys and values; `null` is `bias`."""
    attention_output_bias: bool | None = None
    """The bias of attention's output; `null` is `bias`."""
    attention_scale: float | None = Field(None, gt=0.0, le=1e6)
    """Multiplies the scores; `null` is 1 over the root of `head_dim`."""
    attention_soft_cap: float | None = Field(None, gt=0.0, le=1e6)
    """A number c bounds the scores s softly, c tanh(s / c); `null` does not bound them."""
    attention_sinks: bool = False
    """A learned logit per head that takes weight in the softmax and gives no value."""
    sliding_window: PositiveInt | None = None
    """How many keys a query sees, including its own position; `null` is all."""
    sliding_layers: Layers | None = None
    """The layers with that window, counted from 0; `null` is all."""
    attention_backend: Backend = "auto"
    """What computes attention: `sdpa` (fused kernels), `flex` (FlexAttention, on an NVIDIA GPU), `eager` (step by
    step), or `auto`; one that cannot do what is asked for is refused."""

    bias: bool = True
    """Whether linear layers and LayerNorm have a bias, where no key of their own says otherwise."""
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of activations and attention weights set to zero while training."""
    tie_weights: bool = True
    """Whether the output projection is the embedding."""
    logit_soft_cap: float | None = Field(None, gt=0.0, le=1e6)
    """A number c bounds the logits z softly, c tanh(z / c); `null` does not bound them."""

    initialization: Initialization = "gpt2"
    """How matrices begin; `gpt2` is `normal`, smaller where a residual branch ends, and `mup` follows the width."""
    initial_std: float = Field(0.02, gt=0.0)
    """Standard deviation of `gpt2`, `normal` and `mup`, and of embeddings (unless positions are sinusoidal) and
    learned positions."""
    mup_base_d_model: PositiveInt | None = None
    """Of `mup`, which needs it: the `d_model` at which the learning rate was found."""
    mup_base_head_dim: PositiveInt | None = None
    """Of `mup`: the `head_dim` at that width; `null` is the same as now."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise ValueError(f"preset {preset!r} is not known. Known presets: {', '.join(PRESETS)}")
        values = {**(PRESETS[preset] if preset else {}), **given}
        d_model, num_heads = _size(cls, values, "d_model"), _size(cls, values, "num_heads")
        if d_model is None or num_heads is None:
            return values
        if values.get("head_dim") is None and d_model % num_heads:
            raise ValueError(
                f"d_model = {d_model} is not divisible by num_heads = {num_heads}. "
                f"Choose a multiple of {num_heads}, or set head_dim."
            )
        _fill(values, "head_dim", d_model // num_heads)
        _fill(values, "value_head_dim", _size(cls, values, "head_dim"))
        _fill(values, "num_kv_heads", num_heads)
        gated = values.get("activation") in tuple(GATED)
        _fill(values, "d_ff", -(-8 * d_model // 3 // 32) * 32 if gated else 4 * d_model)
        sinusoidal = values.get("position_encoding", cls.model_fields["position_encoding"].default) == "sinusoidal"
        # A muP network is scaled as the one its hyperparameters were found with.
        base = _size(cls, values, "mup_base_d_model") or d_model
        _fill(values, "embedding_scale", math.sqrt(base) if sinusoidal else 1.0)
        bias = values.get("bias", cls.model_fields["bias"].default)
        for name in ("feed_forward_bias", "attention_bias", "attention_output_bias"):
            _fill(values, name, bias)
        # Not `bias and ...`: it may still be a text that means true or false.
        is_layernorm = values.get("norm", cls.model_fields["norm"].default) == "layernorm"
        _fill(values, "norm_bias", bias if is_layernorm else False)
        _fill(values, "final_norm", values.get("norm_position", cls.model_fields["norm_position"].default) != "post")
        if values.get("architecture") == "encoder_decoder":
            _fill(values, "num_encoder_layers", values.get("num_layers", cls.model_fields["num_layers"].default))
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for problem in (*self._size_problems(), *self._position_problems(), *self._choice_problems()):
            raise ValueError(problem)
        return self

    def _size_problems(self) -> Iterator[str]:
        if self.num_heads % self.kv_heads:
            yield (
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}: each key-value "
                "head must serve the same number of query heads"
            )
        experts = None if self.experts is None else self.experts.layers
        for name, layers in (("sliding_layers", self.sliding_layers), ("experts.layers", experts)):
            if layers is not None and max(layers) >= self.num_layers:
                yield f"{name} names layer {max(layers)}; the {self.num_layers} layers are counted from 0"
            if layers is not None and len(set(layers)) < len(layers):
                yield f"{name} names a layer twice"

    def _position_problems(self) -> Iterator[str]:
        rotary, sinusoidal = (self.position_encoding == encoding for encoding in ("rope", "sinusoidal"))
        if rotary and (self.rotary_dim < 2 or self.rotary_dim % 2):
            yield (
                f"head_dim = {self.head_dim} with rotary_fraction = {self.rotary_fraction} gives {self.rotary_dim} "
                f"rotated columns; rotary positions turn pairs of columns, so choose an even number"
            )
        factors = None if self.rotary_scaling is None else self.rotary_scaling.pair_factors
        if rotary and factors is not None and 2 * len(factors) != self.rotary_dim:
            yield (
                f"rotary_scaling.pair_factors has {len(factors)} numbers; it needs one for each of the "
                f"{self.rotary_dim // 2} rotated pairs of columns"
            )
        for name in ("rotary_scaling", "sliding_position_base"):
            if getattr(self, name) is not None and not rotary:
                yield f"{name} is for position_encoding: rope, not {self.position_encoding}"
        for name, unread in (("rotary_fraction", not rotary), ("position_base", not (rotary or sinusoidal))):
            if unread and getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name} is not read by position_encoding: {self.position_encoding}"
        if self.sliding_window is None:
            for name in ("sliding_layers", "sliding_position_base"):
                if getattr(self, name) is not None:
                    yield f"{name} needs a sliding_window"

    def _choice_problems(self) -> Iterator[str]:
        if self.norm_bias and self.norm != "layernorm":
            yield f"norm_bias is for norm: layernorm; {self.norm} has no bias"
        if self.parallel_residual and self.norm_position == "post":
            yield (
                "parallel_residual adds both branches in one sum, but norm_position: post puts a norm after each; "
                "choose another"
            )
        drawn_with_std = self.initialization in _WITH_STD or self.position_encoding != "sinusoidal"
        if not drawn_with_std and self.initial_std != type(self).model_fields["initial_std"].default:
            yield (
                f"initial_std is not read by initialization: {self.initialization} under sinusoidal positions, "
                "where the embedding has a scale of its own"
            )
        if (self.initialization == "mup") != (self.mup_base_d_model is not None):
            yield "initialization: mup and mup_base_d_model need each other"
        if self.mup_base_head_dim is not None and self.initialization != "mup":
            yield "mup_base_head_dim is for initialization: mup"
        if self.mup_base_head_dim is not None and self.attention_scale is not None:
            yield "attention_scale and mup_base_head_dim both set what scores are multiplied by; leave one out"
        lacking = self.attention_features - BACKEND_FEATURES.get(self.attention_backend, FEATURES)
        for feature in sorted(lacking):
            able = [name for name, features in BACKEND_FEATURES.items() if feature in features]
            yield f"attention_backend: {self.attention_backend} has no {feature}; use {' or '.join(able)}"
        if self.architecture == "decoder" and self.num_encoder_layers is not None:
            yield "num_encoder_layers is for architecture: encoder_decoder"
        if self.architecture == "encoder_decoder":
            for name in ("sliding_window", "experts", "ngrams", "short_convolution"):
                if getattr(self, name) is not None:
                    yield f"{name} is for architecture: decoder; an encoder-decoder has two stacks of layers"
            if self.parallel_residual:
                yield "parallel_residual leaves no place for attention to an encoder; it is for architecture: decoder"

    @property
    def head_size(self) -> int:
        """C, the width of one head of queries and keys, as a plain integer."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def value_size(self) -> int:
        """The width of one head of values, as a plain integer."""
        assert self.value_head_dim is not None
        return self.value_head_dim

    @property
    def rotary_dim(self) -> int:
        """Columns of every head that rotary positions turn."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def kv_heads(self) -> int:
        """K, the number of key-value heads, as a plain integer."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """F, the width of the feed-forward layer, as a plain integer."""
        assert self.d_ff is not None
        return self.d_ff

    @property
    def vocabulary(self) -> int:
        """V, which must have been resolved before a network is built."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not resolved yet; it is taken from the tokenizer")
        return self.vocab_size

    @property
    def width_multiplier(self) -> float:
        """How many times wider a muP network is than the one its hyperparameters were found with; otherwise 1."""
        return 1.0 if self.mup_base_d_model is None else self.d_model / self.mup_base_d_model

    @property
    def score_scale(self) -> float | None:
        """What scores are multiplied by; None is 1 / sqrt(C). A multiple of 1 / C under muP (Yang et al. 2022)."""
        if self.attention_scale is None and self.mup_base_head_dim is not None:
            return math.sqrt(self.mup_base_head_dim) / self.head_size
        return self.attention_scale

    @property
    def attention_features(self) -> frozenset[str]:
        """What the attention of this network asks of its backend; see `sheepop.model.attention.features`."""
        asked = {
            "dropout": self.dropout > 0,
            "soft cap": self.attention_soft_cap is not None,
            "sinks": self.attention_sinks,
            "bidirectional attention": self.architecture == "encoder_decoder",
        }
        return frozenset(feature for feature, needed in asked.items() if needed)

    def window(self, layer: int) -> int | None:
        """How many keys a query of `layer` sees, itself included; None for all."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward network of `layer` is a mixture of experts."""
        return self.experts is not None and (self.experts.layers is None or layer in self.experts.layers)


def _fill(values: dict[str, Any], name: str, derived: Any) -> None:
    if values.get(name) is None:
        values[name] = derived


def _size(cls: type[ModelConfig], values: dict[str, Any], name: str) -> int | None:
    """The size as an integer, or None when it is not one (field validation then names the key)."""
    value = values.get(name, cls.model_fields[name].default)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST else None
