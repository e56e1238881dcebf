"""Recovers Llama 3's scaling of rotary positions from the divisors of the angles.

A file has one divisor for each pair of columns: 1 for a pair that is not scaled, the factor for an interpolated pair,
and for a mixed pair a value that follows from the original context and the two bounds (Llama 3.1, 2024). Only the
ratios of original context and bounds matter, so the lower bound is assumed to be 1, as in every published model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling

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
