"""The sections of the `model` subtree: experts, latent attention, layers without attention, further embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config

# Strict: "256", 256.0 and true are not sizes, and derived sizes need real integers. Bounded, because a configuration
# may come from an untrusted file.
LARGEST_SIZE = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_SIZE, strict=True)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)]


class ExpertsConfig(Config):
    """A mixture of experts that replaces the feed-forward network of some layers (Shazeer et al. 2017)."""

    count: Annotated[int, Field(ge=2, le=2**16, strict=True)]
    """Number of experts in a layer."""
    per_token: PositiveInt = 2
    """Number of experts that the router chooses for each token; at most `count`."""
    d_ff: PositiveInt | None = None
    """Hidden width of one expert; `null` is `model.d_ff`."""
    shared: Annotated[int, Field(ge=0, le=2**16, strict=True)] = 0
    """Number of shared experts, which process every token in addition to those chosen."""
    shared_gate: bool = False
    """Whether a learned gate between 0 and 1 multiplies the output of the shared experts at each token."""
    layers: Layers | None = None
    """Indices of the layers with experts, counted from 0; `null` is all layers."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router turns logits into scores: a `softmax` over the experts, or a `sigmoid` of each."""
    router_bias: bool = False
    """Whether a learned bias is added to the router's logits."""
    router_scale: float = Field(1.0, gt=0.0, le=1e6)
    """Factor for the router's logits, before their bias."""
    own_norms: bool = False
    """Whether the router, the experts and the shared experts each normalise the residual stream by a norm of their
    own, in the place of the norm before the feed-forward layer, and outputs of experts and of shared experts too."""
    expert_scales: bool = False
    """Whether a learned factor for each expert multiplies its weight."""
    groups: PositiveInt = 1
    """Number of groups of neighbouring experts, a divisor of `count`. A token's experts come from its best
    `groups_per_token` groups; 1 is no groups."""
    groups_per_token: PositiveInt = 1
    """Number of groups from which the experts of a token are chosen; at most `groups`."""
    group_top: PositiveInt = 1
    """A group is as good as the sum of this many of its best scores."""
    normalize: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = Field(1.0, gt=0.0, le=1e6)
    """Factor for the weights of the chosen experts."""
    load_balancing_loss: float = Field(0.01, ge=0.0)
    """Coefficient of the loss that balances the experts' loads (Fedus et al. 2021, equation 4)."""
    router_z_loss: float = Field(0.001, ge=0.0)
    """Coefficient of the loss that keeps the router's logits small (Zoph et al. 2022, equation 5)."""
    bias_update_rate: float = Field(0.0, ge=0.0)
    """Step by which each update moves the router's biases towards even loads (Wang et al. 2024); 0 keeps them at 0."""

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        if self.per_token > self.count:
            raise ValueError(f"experts.per_token = {self.per_token} exceeds experts.count = {self.count}")
        if self.count % self.groups:
            raise ValueError(f"experts.groups = {self.groups} does not divide experts.count = {self.count}")
        size, kept = self.count // self.groups, self.groups_per_token
        if kept > self.groups:
            raise ValueError(f"experts.groups_per_token = {kept} exceeds experts.groups = {self.groups}")
        if self.per_token > kept * size:
            raise ValueError(
                f"experts.per_token = {self.per_token} exceeds the {kept * size} experts of "
                f"experts.groups_per_token = {kept} groups"
            )
        if self.group_top > (size if self.groups > 1 else 1):
            raise ValueError(
                f"experts.group_top = {self.group_top} exceeds the {size} experts of a group"
                if self.groups > 1
                else "experts.group_top has no effect without experts.groups"
            )
        if self.shared_gate and not self.shared:
            raise ValueError("experts.shared_gate needs experts.shared")
        return self


class LatentAttentionConfig(Config):
    """Attention whose keys and values come from one small vector for each token, its latent (DeepSeek-AI 2024).

    A cache holds the latent and one rotary key for all heads, instead of the keys and values of every head.
    """

    kv_rank: PositiveInt
    """Width of the latent from which keys and values are computed."""
    q_rank: PositiveInt | None = None
    """Width of the latent from which queries are computed; `null` computes them without one."""
    rope_head_dim: PositiveInt
    """Number of the `head_dim` columns of a query or key whose key all heads share; only these are rotated."""
    norm_eps: float = Field(1e-6, gt=0.0)
    """Added under the root of the norms of the latents."""


class LayerInputsConfig(Config):
    """A small vector of each token for each layer, which gates a branch at the end of the layer (Gemma 3n, 2025)."""

    width: PositiveInt
    """Width of the vectors."""


class NgramConfig(Config):
    """Vectors of n-grams, looked up by hash and added to the embedding of the n-gram's last token.

    They cost no matrix products and spare a small network the layers that would learn n-grams (Pagnoni et al. 2024,
    section 3.2.1).
    """

    orders: Annotated[tuple[Annotated[int, Field(ge=2, le=8, strict=True)], ...], Field(min_length=1)] = (2, 3)
    """The n-gram lengths in tokens; each length has its own table of vectors."""
    rows: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] = 65_536
    """Vectors in each table; n-grams whose hashes collide share one."""

    @model_validator(mode="after")
    def _check(self) -> NgramConfig:
        if list(self.orders) != sorted(set(self.orders)):
            raise ValueError(f"orders = {list(self.orders)}: give each number once, in ascending order")
        return self


class GatedConvolutionConfig(Config):
    """Gated short convolutions instead of attention (LFM2, Liquid AI 2025)."""

    layers: Layers
    """Indices of the layers with convolutions, counted from 0."""
    width: Annotated[int, Field(ge=2, le=16, strict=True)] = 3
    """Width of the convolution in tokens, its own included."""
    bias: bool = False
    """Whether the projections and the convolution have biases."""


class GatedDeltaNetConfig(Config):
    """Linear attention by the gated delta rule instead of attention (Yang et al. 2025, Gated DeltaNet)."""

    layers: Layers
    """Indices of the layers with a Gated DeltaNet, counted from 0."""
    num_key_heads: PositiveInt
    """Number of query and key heads."""
    num_value_heads: PositiveInt
    """Number of value heads, a multiple of `num_key_heads`; each has a state of `key_head_dim` times `value_head_dim`
    numbers."""
    key_head_dim: PositiveInt
    """Width of a query and key head."""
    value_head_dim: PositiveInt
    """Width of a value head."""
    width: Annotated[int, Field(ge=2, le=16, strict=True)] = 4
    """Width in tokens of the causal convolution over queries, keys and values."""

    @model_validator(mode="after")
    def _check(self) -> GatedDeltaNetConfig:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads = {self.num_key_heads} does not divide num_value_heads = {self.num_value_heads}: each "
                "key head must serve the same number of value heads"
            )
        return self

    @property
    def key_width(self) -> int:
        """The width of all query heads, and of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """The width of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def state_size(self) -> int:
        """The numbers of the state of one layer."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim
