"""Settings that scale rotary positions for contexts longer than the training context."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config

Kind = Literal["linear", "ntk", "yarn", "llama3", "longrope", "proportional"]
PairFactors = Annotated[tuple[Annotated[float, Field(gt=0.0, le=1e6)], ...], Field(min_length=1, max_length=2**15)]
# The keys that each kind reads besides `factor`, with their defaults; None marks a required key.
_KEYS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ntk": {},
    "yarn": {
        "original_max_seq_len": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": "derived",
        "truncate": True,
    },
    "llama3": {"original_max_seq_len": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"fraction": None},
    "longrope": {"original_max_seq_len": None, "pair_factors": None, "attention_factor": "derived"},
}


class RotaryScaling(Config):
    """How the angles of rotary positions are scaled for a context `factor` times as long.

    linear: divides every position by `factor` (Chen et al. 2023, position interpolation). ntk: raises the base so that
    the slowest pair rotates `factor` times slower and the fastest as before. yarn: interpolates slow pairs, keeps fast
    ones and mixes the ones between (Peng et al. 2023, sections 3.2 to 3.4). llama3: does so by the wavelength of a pair
    (Llama 3.1, 2024). longrope: slows each pair by its own factor, found by search (Ding et al. 2024, section 3); one
    table of factors for sequences of any length. proportional: rotates only fast pairs (Barbero et al. 2024,
    p-RoPE).
    """

    kind: Kind
    """Which pairs rotate slower: all (`linear`), all but the fastest (`ntk`), the slow ones (`yarn`, `llama3`), or
    each by its own factor (`longrope`), or all by `factor` of which the slow ones do not rotate (`proportional`)."""
    factor: float = Field(ge=1.0, le=1e6)
    """Length of the context as a multiple of the training context."""
    original_max_seq_len: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] | None = None
    """`yarn`, `llama3` and `longrope` only, required: context length of the original training, in tokens."""
    beta_fast: float | None = Field(None, gt=0.0)
    """`yarn` only: a pair with more turns than this over the original context is not scaled; `null` is 32."""
    beta_slow: float | None = Field(None, gt=0.0)
    """`yarn` only: a pair with fewer turns than this over the original context is interpolated; `null` is 1."""
    attention_factor: float | None = Field(None, gt=0.0)
    """`yarn` and `longrope` only: factor for cosines and sines; `null` is 0.1 ln(`factor`) + 1, for `longrope` the
    root of 1 + ln(`factor`) / ln(`original_max_seq_len`)."""
    truncate: bool | None = None
    """`yarn` only: whether the bounds of the mixed pairs are rounded to whole pairs; `null` is `true`."""
    low_freq_factor: float | None = Field(None, gt=0.0)
    """`llama3` only: a pair with fewer turns than this over the original context is interpolated; `null` is 1."""
    high_freq_factor: float | None = Field(None, gt=0.0)
    """`llama3` only: a pair with more turns than this over the original context is not scaled; `null` is 4."""
    fraction: float | None = Field(None, ge=0.0, le=1.0)
    """`proportional` only, required: share of the pairs that rotate, the fastest ones."""
    pair_factors: PairFactors | None = None
    """`longrope` only, required: the divisor of each column pair's angle."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("kind") not in tuple(_KEYS):
            return given
        values = {name: value for name, value in given.items() if value is not None}
        kind, factor = values["kind"], values.get("factor")
        for name, default in _KEYS[kind].items():
            if default is None and name not in values:
                raise ValueError(f"kind: {kind} needs {name}")
            if default == "derived":
                default = _derived_attention_factor(kind, factor, values.get("original_max_seq_len"))
            values.setdefault(name, default)
        return values

    @model_validator(mode="after")
    def _check(self) -> RotaryScaling:
        for name in type(self).model_fields.keys() - {"kind", "factor"} - _KEYS[self.kind].keys():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with kind: {self.kind}")
        if self.kind == "longrope" and self.attention_factor is None:
            raise ValueError("kind: longrope needs attention_factor if original_max_seq_len = 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"high_freq_factor = {high} must exceed low_freq_factor = {low}")
        # Equal numbers mix no pair: each is scaled or not (Kimi K2).
        if self.beta_slow is not None and self.beta_fast is not None and self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_fast = {self.beta_fast} is less than beta_slow = {self.beta_slow}")
        return self


def _derived_attention_factor(kind: str, factor: Any, original: Any) -> float | None:
    """YaRN: 0.1 ln s + 1 (Peng et al. 2023, equation 22). LongRoPE: sqrt(1 + ln s / ln L) (Phi-3, 2024)."""
    if not isinstance(factor, int | float) or factor < 1:
        return None
    if kind == "yarn":
        return 0.1 * math.log(factor) + 1
    if not isinstance(original, int) or original < 2:
        return None
    return math.sqrt(1 + math.log(factor) / math.log(original))
