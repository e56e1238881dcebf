"""The sections of the `model` subtree: a mixture of experts, and vectors of n-grams."""

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
    layers: Layers | None = None
    """Indices of the layers with experts, counted from 0; `null` is all layers."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router turns logits into scores: a `softmax` over the experts, or a `sigmoid` of each."""
    router_bias: bool = False
    """Whether a learned bias is added to the router's logits."""
    normalize: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
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
        return self


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
