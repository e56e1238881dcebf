"""The keys of the `model` subtree of the configuration, and what follows from them."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from sheepop.core.config import Config
from sheepop.core.names import Names
from sheepop.model.rotary_scaling import RotaryScaling
from sheepop.model.sections import (
    ExpertsConfig,
    GatedConvolutionConfig,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerInputsConfig,
    Layers,
    NgramConfig,
    PositiveInt,
)

Architecture = Literal["decoder", "encoder_decoder"]
PositionEncoding = Literal["sinusoidal", "learned", "rope", "alibi", "none"]
NormKind = Literal["layernorm", "rmsnorm", "rmsnorm_zero_centered"]
NormPosition = Literal["pre", "post", "sandwich", "output"]
QueryKeyNorm = Literal["head", "own_head", "width"]
Mixer = Literal["gated_convolution", "gated_delta_net"]
ACTIVATION_NAMES = Names("relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh")
Activation = Annotated[str, ACTIVATION_NAMES]
Backend = Literal["auto", "sdpa", "flex", "eager"]
Initialization = Literal[
    "gpt2", "normal", "xavier_uniform", "xavier_normal", "fan_in_uniform", "fan_in_normal", "he", "mup"
]
GATED = {"swiglu", "swiglu_clamped", "geglu", "geglu_tanh"}
LayerCount = Annotated[int, Field(ge=1, le=10_000, strict=True)]


class Heads(NamedTuple):
    """K, the number of key-value heads of a layer, and the widths of a key and of a value head."""

    kv_heads: int
    key_width: int
    value_width: int


class ModelOptions(Config):
    """Sizes and options of a transformer; `ModelConfig` derives those that are left out, and checks them."""

    preset: str | None = None
    """A named size; keys that you set override its values; `null` is none."""
    architecture: Architecture = "decoder"
    """`decoder` is a language model; `encoder_decoder` reads a source sequence and writes a target sequence."""
    vocab_size: PositiveInt | None = None
    """Number of embedding rows, at least the tokenizer's size; `null` is the tokenizer's size."""
    d_model: PositiveInt = 256
    """Width of the residual stream."""
    num_layers: LayerCount = 6
    """Number of blocks; for an `encoder_decoder`, of its decoder."""
    num_encoder_layers: LayerCount | None = None
    """`encoder_decoder` only: number of encoder blocks; `null` is `num_layers`."""
    num_heads: PositiveInt = 8
    """Number of query heads in each attention layer."""
    num_kv_heads: PositiveInt | None = None
    """Number of key-value heads, a divisor of `num_heads`; `null` is `num_heads` (multi-head attention)."""
    head_dim: PositiveInt | None = None
    """Width of a query and key head; `null` is `d_model / num_heads`, which must then be a whole number."""
    value_head_dim: PositiveInt | None = None
    """Width of a value head; `null` is `head_dim`."""
    d_ff: PositiveInt | None = None
    """Hidden width of the feed-forward layer; `null` is 4 `d_model`, or with a gated activation 8/3 `d_model`
    rounded up to a multiple of 32."""
    layer_d_ff: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Hidden width of the feed-forward layer in each layer; `null` is `d_ff` in all."""
    max_seq_len: PositiveInt = 256
    """Longest sequence in tokens (the context length)."""

    ngrams: NgramConfig | None = None
    """Hashed n-gram vectors, added to the token embeddings; `null` is none."""
    layer_inputs: LayerInputsConfig | None = None
    """Vectors of each token for each layer; `null` is none."""

    position_encoding: PositionEncoding = "sinusoidal"
    """How the network encodes positions; `rope` is rotary, `alibi` a distance bias on the scores."""
    position_base: float = Field(10000.0, gt=1.0, le=1e15)
    """Base of the `sinusoidal` and `rope` frequencies."""
    rotary_fraction: float = Field(1.0, gt=0.0, le=1.0)
    """`rope` only: share of each head's columns that is rotated."""
    rotary_scaling: RotaryScaling | None = None
    """`rope` only: how angles are scaled for a longer context; `null` does not scale them."""
    sliding_position_base: float | None = Field(None, gt=1.0, le=1e15)
    """`rope` only: base for layers with a sliding window, whose angles are then not scaled; `null` treats them like
    the other layers."""
    rotary_layers: Layers | None = None
    """`rope` only: indices of the layers that rotate queries and keys, counted from 0; `null` is all layers. The other
    layers do not encode positions."""
    embedding_scale: float | None = Field(None, gt=0.0, le=1e6)
    """Factor for the embeddings; `null` is the root of `d_model` with `sinusoidal` positions (with `mup` that of
    `mup_base_d_model`), otherwise 1."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding."""

    norm: NormKind = "layernorm"
    """Kind of norm; `rmsnorm_zero_centered` scales by 1 + weight."""
    norm_position: NormPosition = "pre"
    """Where the norms are. `pre`: x + f(norm(x)); `post`: norm(x + f(x)); `sandwich`: x + norm(f(norm(x)));
    `output`: x + norm(f(x))."""
    norm_eps: float = Field(1e-5, gt=0.0)
    """Added under the root of the norm, to avoid division by zero."""
    norm_bias: bool | None = None
    """Whether `layernorm` has a bias; `null` is `bias`."""
    final_norm: bool | None = None
    """Whether a norm precedes the output projection; `null` is `true` unless `norm_position` is `post`."""
    qk_norm: QueryKeyNorm | None = None
    """Norm of queries and keys, over each `head`, over each head with a weight of its own and no bias (`own_head`), or
    over the `width` of all heads together; `null` is none."""

    activation: Activation = "gelu"
    """Activation of the feed-forward layer; `swiglu`, `swiglu_clamped`, `geglu` and `geglu_tanh` are gated, `_tanh`
    approximates GELU, and `swiglu_clamped` is that of gpt-oss."""
    feed_forward_bias: bool | None = None
    """Whether the feed-forward layer has biases; `null` is `bias`."""
    experts: ExpertsConfig | None = None
    """A mixture of experts instead of the feed-forward layer; `null` is none."""
    parallel_residual: bool = False
    """Whether both sublayers read the same input and their outputs are added: x + attention(norm(x)) +
    feed_forward(norm'(x))."""
    shared_norm: bool = False
    """`parallel_residual` only: whether both sublayers read the same normalised input, norm' being norm."""
    residual_scale: float = Field(1.0, gt=0.0, le=1e6)
    """Factor for the output of each sublayer before it is added to the residual stream."""
    layer_factor: bool = False
    """Whether a learned number of each layer multiplies the residual stream behind the layer."""

    gated_convolution: GatedConvolutionConfig | None = None
    """Gated short convolutions instead of attention in some layers; `null` is none."""
    gated_delta_net: GatedDeltaNetConfig | None = None
    """Gated DeltaNet instead of attention in some layers; `null` is none."""

    short_convolution: Annotated[int, Field(ge=2, le=16, strict=True)] | None = None
    """Width in tokens of a causal convolution over each channel of queries, keys and values before attention; `null`
    is none."""
    latent_attention: LatentAttentionConfig | None = None
    """Latents from which keys and values, and perhaps queries, are computed; `null` is none."""
    attention_bias: bool | None = None
    """Whether queries, keys and values have biases, with `latent_attention` only their latents; `null` is `bias`."""
    attention_output_bias: bool | None = None
    """Whether attention's output projection has a bias; `null` is `bias`."""
    attention_scale: float | None = Field(None, gt=0.0, le=1e6)
    """Factor for the attention scores; `null` is 1 / sqrt(`head_dim`)."""
    attention_soft_cap: float | None = Field(None, gt=0.0, le=1e6)
    """Caps the scores s softly at this number c: c tanh(s / c); `null` does not cap them."""
    attention_output_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a projection of its input."""
    attention_sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and contributes no value."""
    sliding_window: PositiveInt | None = None
    """Number of keys that a query attends to, its own position included; `null` is all."""
    sliding_layers: Layers | None = None
    """Indices of the layers with the sliding window, counted from 0; `null` is all layers."""
    sliding_head_dim: PositiveInt | None = None
    """Width of a query, key and value head in layers with the sliding window; `null` is that of the other layers."""
    sliding_num_kv_heads: PositiveInt | None = None
    """Number of key-value heads in layers with the sliding window; `null` is `num_kv_heads`."""
    shared_kv_layers: Annotated[int, Field(ge=0, le=10_000, strict=True)] = 0
    """Number of last layers without keys and values of their own, which use those of the last layer before them all
    that has the same window and rotation."""
    keys_as_values: Layers | None = None
    """Indices of the layers whose values are their keys before norm and rotation; `null` is none."""
    value_norm: bool = False
    """Whether each value head is divided by its root mean square."""
    attention_backend: Backend = "auto"
    """Attention implementation: `sdpa` (fused kernels), `flex` (FlexAttention, on an NVIDIA GPU), `eager` (step by
    step), or `auto`; a backend that lacks a needed feature is refused."""

    bias: bool = True
    """Whether linear layers and LayerNorm have a bias, unless their own key overrides it."""
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of activations and attention weights that training sets to zero."""
    tie_weights: bool = True
    """Whether the output projection shares the embedding's weight."""
    head_bias: bool = False
    """Whether the output projection has a bias."""
    logit_soft_cap: float | None = Field(None, gt=0.0, le=1e6)
    """Caps the logits z softly at this number c: c tanh(z / c); `null` does not cap them."""
    logit_scale: float = Field(1.0, gt=0.0, le=1e6)
    """Factor for the logits, before their bias and the soft cap; `mup` divides them by its width multiplier as well."""

    initialization: Initialization = "gpt2"
    """How matrices are initialised; `gpt2` is `normal` with a smaller deviation at the end of residual branches,
    `mup` scales with the width."""
    initial_std: float = Field(0.02, gt=0.0)
    """Standard deviation for `gpt2`, `normal` and `mup`, and for learned positions and embeddings (unless positions
    are sinusoidal)."""
    mup_base_d_model: PositiveInt | None = None
    """`mup` only, required: the `d_model` at which the learning rate was tuned."""
    mup_base_head_dim: PositiveInt | None = None
    """`mup` only: the `head_dim` of the network at `mup_base_d_model`; `null` is `head_dim`."""

    @property
    def mixers(self) -> dict[Mixer, GatedConvolutionConfig | GatedDeltaNetConfig]:
        """The settings of the layers that replace attention, by name."""
        found: dict[Mixer, GatedConvolutionConfig | GatedDeltaNetConfig] = {}
        if self.gated_convolution is not None:
            found["gated_convolution"] = self.gated_convolution
        if self.gated_delta_net is not None:
            found["gated_delta_net"] = self.gated_delta_net
        return found

    def mixer(self, layer: int) -> Mixer | None:
        """What `layer` has instead of attention: the name of its section; None is attention."""
        return next((name for name, section in self.mixers.items() if layer in section.layers), None)

    @property
    def head_size(self) -> int:
        """C, the width of a query and key head without a sliding window, as a plain integer."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def value_size(self) -> int:
        """The width of a value head without a sliding window, as a plain integer."""
        assert self.value_head_dim is not None
        return self.value_head_dim

    @property
    def rotary_dim(self) -> int:
        """R, the number of columns of each head that rotary positions rotate, without a sliding window."""
        return self.rotary_width(sliding=False)

    def rotary_width(self, *, sliding: bool) -> int:
        """R of the layers with a sliding window, or of the others."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_head_dim
        return int(self.heads_of(sliding=sliding).key_width * self.rotary_fraction)

    def heads_of(self, *, sliding: bool) -> Heads:
        """The key-value heads of the layers with a sliding window, or of the others."""
        heads = Heads(self.kv_heads, self.head_size, self.value_size)
        if not sliding:
            return heads
        width = self.sliding_head_dim
        of_width = heads if width is None else heads._replace(key_width=width, value_width=width)
        return of_width._replace(kv_heads=self.sliding_num_kv_heads or heads.kv_heads)

    def heads(self, layer: int) -> Heads:
        """The key-value heads of `layer`."""
        return self.heads_of(sliding=self.window(layer) is not None)

    @property
    def widest_heads(self) -> Heads:
        """The largest number of key-value heads, and the largest widths, of any layer."""
        return Heads(*map(max, zip(*map(self.heads, range(self.num_layers)), strict=True)))

    @property
    def narrowest_head(self) -> int:
        """The smallest width of a key or value head of any layer."""
        return min(min(self.heads(layer)[1:]) for layer in range(self.num_layers))

    def cached_heads(self, layer: int) -> Heads:
        """The heads that a cache holds for each token in `layer`; 0 if the layer has no keys and values of its own.

        Latent attention has one head, whose key is the shared rotary key, and whose value is the latent.
        """
        latent = self.latent_attention
        if self.kv_source(layer) != layer:
            return Heads(0, 0, 0)
        return self.heads(layer) if latent is None else Heads(1, latent.rope_head_dim, latent.kv_rank)

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values `layer` uses, itself or one that shares them; None without attention."""
        if self.mixer(layer) is not None:
            return None
        own = self.num_layers - self.shared_kv_layers
        if layer < own or not self.shared_kv_layers:
            return layer
        seen = self.window(layer), self.rotates(layer)
        alike = (each for each in range(own) if (self.window(each), self.rotates(each)) == seen)
        return max((each for each in alike if self.mixer(each) is None), default=None)

    def gives_keys(self, layer: int) -> bool:
        """Whether another layer uses the keys and values of `layer`."""
        shared = range(self.num_layers - self.shared_kv_layers, self.num_layers)
        return any(self.kv_source(other) == layer for other in shared)

    @property
    def kv_heads(self) -> int:
        """K, the number of key-value heads, as a plain integer."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """F, the width of a feed-forward layer without a width of its own, as a plain integer."""
        assert self.d_ff is not None
        return self.d_ff

    def ffn_width(self, layer: int) -> int:
        """F of `layer`."""
        return self.ffn_size if self.layer_d_ff is None else self.layer_d_ff[layer]

    @property
    def vocabulary(self) -> int:
        """V, as a plain integer; raises `ValueError` before `vocab_size` is resolved."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not resolved yet; it is taken from the tokenizer")
        return self.vocab_size

    @property
    def width_multiplier(self) -> float:
        """The width of a muP network relative to the one its hyperparameters were tuned on; 1 for other networks."""
        return 1.0 if self.mup_base_d_model is None else self.d_model / self.mup_base_d_model

    @property
    def output_scale(self) -> float:
        """The factor of the final hidden states, which scales the logits."""
        return self.logit_scale / self.width_multiplier

    @property
    def score_scale(self) -> float | None:
        """The factor of the scores; None is 1 / sqrt(C). With muP it falls with 1 / C (Yang et al. 2022)."""
        if self.attention_scale is None and self.mup_base_head_dim is not None:
            return math.sqrt(self.mup_base_head_dim) / self.head_size
        return self.attention_scale

    def window(self, layer: int) -> int | None:
        """The number of keys that a query of `layer` attends to, its own included; None is all, or no attention."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides and self.mixer(layer) is None else None

    def rotates(self, layer: int) -> bool:
        """Whether `layer` rotates queries and keys by their positions."""
        listed = self.rotary_layers is None or layer in self.rotary_layers
        return self.position_encoding == "rope" and listed and self.mixer(layer) is None

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has a mixture of experts instead of a feed-forward network."""
        return self.experts is not None and (self.experts.layers is None or layer in self.experts.layers)
