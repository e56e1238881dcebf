"""The network's configuration subtree, resolved at validation: preset first, then explicit keys, then derived sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config
from sheepop.model.presets import PRESETS

PositionEncoding = Literal["sinusoidal", "learned", "rope"]
NormKind = Literal["layernorm", "rmsnorm"]
Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]
# Strict: "256", 256.0 and true are not sizes, and the derived sizes below need real integers.
PositiveInt = Annotated[int, Field(ge=1, strict=True)]


class ModelConfig(Config):
    """Sizes and choices of a decoder-only transformer. Sizes left out are derived and written back.

    `preset` names a row of `sheepop.model.presets`; every other key given beside it wins over the preset's value.
    """

    preset: str | None = None
    vocab_size: PositiveInt | None = Field(None, description="rows of the embedding; null takes the tokenizer's")
    d_model: PositiveInt = 256
    num_layers: PositiveInt = 6
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = Field(None, description="null is num_heads (multi-head attention)")
    head_dim: PositiveInt | None = Field(None, description="null is d_model / num_heads")
    d_ff: PositiveInt | None = Field(
        None, description="null is 4 d_model; for swiglu 8/3 d_model, up to a multiple of 32"
    )
    max_seq_len: PositiveInt = 256
    position_encoding: PositionEncoding = "sinusoidal"
    position_base: float = Field(10000.0, gt=1.0, description="the 10000 of sinusoids and rotary angles")
    norm: NormKind = "layernorm"
    norm_eps: float = Field(1e-5, gt=0.0)
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    tie_weights: bool = True

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
        if values.get("head_dim") is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model = {d_model} is not divisible by num_heads = {num_heads}. "
                    f"Choose a multiple of {num_heads}, or set head_dim."
                )
            values["head_dim"] = d_model // num_heads
        if values.get("num_kv_heads") is None:
            values["num_kv_heads"] = num_heads
        if values.get("d_ff") is None:
            gated = values.get("activation") == "swiglu"
            values["d_ff"] = -(-8 * d_model // 3 // 32) * 32 if gated else 4 * d_model
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}: "
                f"each key-value head serves the same number of query heads"
            )
        if self.position_encoding == "rope" and self.head_size % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions turn pairs of columns")
        return self

    @property
    def head_size(self) -> int:
        """C, the width of one head, as a plain integer."""
        assert self.head_dim is not None
        return self.head_dim

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


def _size(cls: type[ModelConfig], values: dict[str, Any], name: str) -> int | None:
    """The size as an integer, or None when it is not one (field validation then names the key)."""
    value = values.get(name, cls.model_fields[name].default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
