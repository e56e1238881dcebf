"""The `model` subtree of the configuration; validation applies the preset, then explicit keys, then derived sizes."""

from __future__ import annotations

import math
from typing import Any

from pydantic import model_validator

from sheepop.model.config_problems import problems
from sheepop.model.options import GATED, ModelOptions
from sheepop.model.presets import PRESETS
from sheepop.model.sections import LARGEST_SIZE


class ModelConfig(ModelOptions):
    """Sizes and options of a transformer. Validation derives the sizes that are left out and stores them."""

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
        # A muP network scales embeddings like the network its hyperparameters were tuned on.
        base = _size(cls, values, "mup_base_d_model") or d_model
        _fill(values, "embedding_scale", math.sqrt(base) if sinusoidal else 1.0)
        bias = values.get("bias", cls.model_fields["bias"].default)
        for name in ("feed_forward_bias", "attention_bias", "attention_output_bias"):
            _fill(values, name, bias)
        # Not `bias and ...`: before validation, `bias` may still be a string that means true or false.
        is_layernorm = values.get("norm", cls.model_fields["norm"].default) == "layernorm"
        _fill(values, "norm_bias", bias if is_layernorm else False)
        _fill(values, "final_norm", values.get("norm_position", cls.model_fields["norm_position"].default) != "post")
        if values.get("architecture") == "encoder_decoder":
            _fill(values, "num_encoder_layers", values.get("num_layers", cls.model_fields["num_layers"].default))
        return values

    @property
    def own_parts(self) -> dict[str, str]:
        """The parts that no other program computes: names in words, by the key that leaves each out if it is null."""
        names = {"ngrams": "n-gram embeddings", "short_convolution": "short convolutions"}
        return {key: words for key, words in names.items() if getattr(self, key) is not None}

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for problem in problems(self):
            raise ValueError(problem)
        return self


def _fill(values: dict[str, Any], name: str, derived: Any) -> None:
    if values.get(name) is None:
        values[name] = derived


def _size(cls: type[ModelConfig], values: dict[str, Any], name: str) -> int | None:
    """The size, or None if it is not a valid integer (field validation then reports the key)."""
    value = values.get(name, cls.model_fields[name].default)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE else None
