"""Rotary positions in llama.cpp's metadata; Llama 3's scaling from the divisors of the angles, which a tensor holds.

A file has one divisor for each pair of columns: 1 for a pair that is not scaled, the factor for an interpolated pair,
and for a mixed pair a value that follows from the original context and the two bounds (Llama 3.1, 2024). Only the
ratios of original context and bounds matter, so the lower bound is assumed to be 1, as in every published model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Field, Settings, is_close, yarn_attention_factor
from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model.config import ModelConfig
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling

BASE = "rope.freq_base"
_DIMENSIONS = "rope.dimension_count"
_KIND = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_LEGACY_FACTOR = "rope.scale_linear"
_ORIGINAL = "rope.scaling.original_context_length"
ATTENTION_FACTOR = "rope.scaling.attn_factor"
# The whole factor as transformers has it, which llama.cpp does not read: it always computes the usual one.
_WHOLE_ATTENTION = "rope.scaling.yarn_attn_factor"
DEFAULT_BASE = 10000.0
# The tensor with one divisor per pair, which expresses the scalings of Llama 3 and of Gemma 4.
DIVISORS = "rope_freqs.weight"
# The divisor of a pair that does not turn.
STANDING = 1e30
# For the architectures that SheepOp writes, llama.cpp always uses these numbers and ignores the keys.
_BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_ext_factor": 1.0}


@dataclass(frozen=True)
class Rotary(Field):
    """Rotary positions. `partial` architectures can rotate a part of each head; `divisors` express Llama 3's scaling.

    Scaling ``ntk`` is equivalent to another base, and written as such. llama.cpp always rounds the bounds of the pairs
    that ``yarn`` mixes; `truncate` says whether the models of the architecture do.
    """

    partial: bool = False
    divisors: bool = False
    truncate: bool = True
    covers = ("position_encoding", "position_base", "rotary_fraction", "rotary_scaling")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of other position encodings, of partly rotated heads, and of unsupported scalings."""
        yield from self._refusals(config)

    def _refusals(self, config: ModelConfig) -> Iterator[str]:
        if config.position_encoding != "rope":
            yield f"position_encoding = {config.position_encoding}, but it has rope"
            return
        if not self.partial and config.rotary_dim != config.head_size:
            yield f"rotary_fraction = {config.rotary_fraction:g}, but it rotates whole heads"
        if config.rotary_scaling is not None:
            yield from self._scaling_refusals(config, config.rotary_scaling)

    def write(self, config: ModelConfig) -> Settings:
        """Returns base, number of rotated columns, and scaling."""
        scaling = config.rotary_scaling
        base = config.position_base
        if scaling is not None and scaling.kind == "ntk" and config.rotary_dim > 2:
            base *= scaling.factor ** (config.rotary_dim / (config.rotary_dim - 2))
        entries: Settings = {BASE: base, _DIMENSIONS: config.rotary_dim}
        if scaling is not None and scaling.kind in ("linear", "yarn"):
            entries |= {_KIND: scaling.kind, _FACTOR: scaling.factor}
        if scaling is not None and scaling.kind == "yarn":
            assert scaling.original_max_seq_len is not None and scaling.attention_factor is not None
            entries[_ORIGINAL] = scaling.original_max_seq_len
            factor = scaling.attention_factor / yarn_attention_factor(scaling.factor)
            if not is_close(factor, 1.0):
                entries[ATTENTION_FACTOR] = factor
        return entries

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns base, rotated fraction and scaling; Llama 3's scaling is read from its tensor later."""
        width = settings["head_dim"]
        turned = given.typed(_DIMENSIONS, int, width)
        if not 0 < turned <= width or (turned < width and not self.partial):
            raise given.problem(_DIMENSIONS, f"does not fit heads of {width} columns")
        found: Settings = {
            "position_encoding": "rope",
            "position_base": given.typed(BASE, float, DEFAULT_BASE),
            "rotary_fraction": _fraction(turned, width),
        }
        scaling = _read_scaling(given)
        if scaling is not None and scaling["kind"] == "yarn":
            scaling["truncate"] = self.truncate
        return found if scaling is None else {**found, "rotary_scaling": scaling}

    def _scaling_refusals(self, config: ModelConfig, scaling: RotaryScaling) -> Iterator[str]:
        if scaling.kind in ("longrope", "proportional") or (scaling.kind == "llama3" and not self.divisors):
            yield f"rotary_scaling.kind = {scaling.kind}, but it has linear, yarn and ntk"
        if scaling.kind != "yarn":
            return
        for name, value in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", self.truncate)):
            if getattr(scaling, name) != value:
                yield f"rotary_scaling.{name} = {getattr(scaling, name)}, but it always computes {value}"
        low, high = _ramp(config, scaling)
        if low > high:
            yield "the mixed pairs of rotary_scaling are outside the head, where it computes something else"


def _read_scaling(given: Given) -> Settings | None:
    kind = given.typed(_KIND, str, "linear")
    legacy = given.typed(_LEGACY_FACTOR, float, 0.0)
    factor = given.typed(_FACTOR, float, legacy) or 1.0
    original, attention = given.typed(_ORIGINAL, int, 0), given.typed(ATTENTION_FACTOR, float, 1.0)
    whole = given.typed(_WHOLE_ATTENTION, float, 1.0)
    given.typed("rope.scaling.finetuned", bool, False)  # information about the training, without an effect
    betas = {key: given.typed(key, float, usual) for key, usual in _BETAS.items()}
    if kind not in ("none", "linear", "yarn"):
        raise given.problem(_KIND, "is a scaling that SheepOp does not support; it supports linear, yarn and llama3")
    if kind != "yarn":
        if attention != 1.0:
            raise given.problem(ATTENTION_FACTOR, "belongs to a scaling that SheepOp does not support")
        return None if factor == 1.0 or kind == "none" else {"kind": "linear", "factor": factor}
    for key, value in _BETAS.items():
        if betas[key] != value:
            raise given.problem(key, f"is not {value:g}, the value that llama.cpp always uses")
    usual = yarn_attention_factor(factor)
    if not any(math.isclose(whole, known, rel_tol=1e-3) for known in (1.0, usual)):
        raise given.problem(_WHOLE_ATTENTION, f"is not {usual:g}, the value that llama.cpp always uses")
    if not original:
        raise given.problem(_ORIGINAL, "is missing, but yarn scaling needs it")
    found: Settings = {"kind": "yarn", "factor": factor, "original_max_seq_len": original}
    return found if attention == 1.0 else {**found, "attention_factor": attention * usual}


def _ramp(config: ModelConfig, scaling: RotaryScaling) -> tuple[int, int]:
    """Returns the first and the last pair that YaRN mixes, as llama.cpp computes them."""
    assert scaling.original_max_seq_len is not None

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)  # type: ignore[operator]
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.position_base))

    return max(0, math.floor(pair(32.0))), min(config.rotary_dim - 1, math.ceil(pair(1.0)))


def _fraction(turned: int, width: int) -> float:
    """Returns a fraction from which `ModelConfig` computes exactly `turned` columns."""
    fraction = turned / width
    return fraction if int(width * fraction) == turned else math.nextafter(fraction, 2.0)


_TOLERANCE = 1e-4
# Candidates for the original context that are tried first, and used if no pair is mixed.
_PUBLISHED = (8192,)
_USUAL_BOUND = 4.0
_LARGEST_CONTEXT = 2**31


def find_llama3_scaling(divisors: Tensor, base: float, max_seq_len: int) -> dict[str, Any] | None:
    """Returns the settings of a scaling with these `divisors` (rotary_dim / 2), or None if there is none."""
    plain, _ = rotary_frequencies(2 * len(divisors), base)
    if not bool(torch.isfinite(divisors).all()) or not bool((divisors > 0).all()) or float(divisors.max()) <= 1:
        return None
    factor = _rounded(float(divisors.max()))
    # The unscaled share of each pair: (turns - 1) / (high - 1), with turns = original * frequency / (2 pi).
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = ((kept > _TOLERANCE) & (kept < 1 - _TOLERANCE)).nonzero().flatten().tolist()
    lengths = (*_PUBLISHED, max_seq_len, round(max_seq_len / factor), *_derived_lengths(kept, plain, between))
    for original in lengths:
        for high in _upper_bounds(original, kept, plain, between):
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": high}
            settings = {"kind": "llama3", "factor": factor, "original_max_seq_len": original, **bounds}
            if 1 <= original < _LARGEST_CONTEXT and _gives(settings, divisors, plain, base):
                return settings
    return None


def find_proportional_scaling(divisors: Tensor) -> dict[str, Any] | None:
    """Returns the settings of a scaling with these `divisors` (rotary_dim / 2), of which the last pairs do not turn."""
    stands = divisors >= STANDING / 2
    turns = int((~stands).sum())
    if not turns or not bool(stands[turns:].all()) or not bool((divisors[:turns] == divisors[0]).all()):
        return None
    return {"kind": "proportional", "factor": float(divisors[0]), "fraction": _fraction(turns, len(divisors))}


def _derived_lengths(kept: Tensor, plain: Tensor, between: list[int]) -> Iterator[int]:
    """Yields original contexts that fit the mixed pairs: with the usual upper bound, and with a fitted one."""
    if not between:
        return
    first, last = between[0], between[-1]
    yield round(((_USUAL_BOUND - 1) * float(kept[first]) + 1) * 2 * math.pi / float(plain[first]))
    if first == last:
        yield _longest(kept, plain, first)
        return
    # kept = slope * frequency - 1 / (high - 1)
    slope = float((kept[first] - kept[last]) / (plain[first] - plain[last]))
    offset = slope * float(plain[first]) - float(kept[first])
    if slope > 0 and offset > 0:
        yield round(slope / offset * 2 * math.pi)


def _longest(kept: Tensor, plain: Tensor, pair: int) -> int:
    """Returns the longest context with which `pair` is the only mixed pair.

    With t = context * frequency / (2 pi) turns the upper bound is 1 + (t - 1) / kept. The next pair, slower by r, is
    fully interpolated up to t = r, and the previous pair is not scaled as long as t r exceeds that bound.
    """
    slower, inverse = float(plain[0] / plain[1]), 1 / float(kept[pair])
    most = slower if inverse <= slower else min(slower, (inverse - 1) / (inverse - slower))
    return math.floor(most * 2 * math.pi / float(plain[pair]))


def _upper_bounds(original: int, kept: Tensor, plain: Tensor, between: list[int]) -> Iterator[float]:
    """Yields the usual upper bound, and the one that fits the first mixed pair."""
    yield _USUAL_BOUND
    if between:
        turns = original * float(plain[between[0]]) / (2 * math.pi)
        high = 1 + (turns - 1) / float(kept[between[0]])
        yield from (_rounded(high), high)


def _gives(settings: dict[str, Any], divisors: Tensor, plain: Tensor, base: float) -> bool:
    try:
        scaling = validate(RotaryScaling, settings)
    except ConfigError:
        return False
    scaled, _ = rotary_frequencies(2 * len(divisors), base, scaling)
    return bool(((plain / scaled - divisors).abs() <= _TOLERANCE * divisors).all())


def _rounded(number: float) -> float:
    """Rounds to five significant digits, to remove errors of float32."""
    return float(f"{number:.5g}")
