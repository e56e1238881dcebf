"""Llama 3's scaling of rotary positions, found again from what it divides the angles by.

A file has one divisor for each pair of columns: 1 where the pair is kept, the factor where it is interpolated, and
between the two what follows from the original context and the two bounds (Llama 3.1, 2024). Original context and bounds
only count as quotients, so the lower bound is taken to be 1, which is what every published model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model.rotary_scaling import RotaryScaling, rotary_frequencies

_TOLERANCE = 1e-4
# Tried first, and where no pair lies between the bounds.
_PUBLISHED = (8192,)
_LARGEST_CONTEXT = 2**31


def find_llama3_scaling(divisors: Tensor, base: float, max_seq_len: int) -> dict[str, Any] | None:
    """The settings of a scaling that gives `divisors` (rotary_dim / 2); None when none does."""
    plain, _ = rotary_frequencies(2 * len(divisors), base)
    if not bool(torch.isfinite(divisors).all()) or not bool((divisors > 0).all()) or float(divisors.max()) <= 1:
        return None
    for factor, original, high in _candidates(divisors, plain, max_seq_len):
        if not 1 <= factor < math.inf or not 1 <= original < _LARGEST_CONTEXT or high <= 1:
            continue
        settings = {
            "kind": "llama3",
            "factor": factor,
            "original_max_seq_len": original,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
        }
        if _gives(settings, divisors, plain, base):
            return settings
    return None


def _candidates(divisors: Tensor, plain: Tensor, max_seq_len: int) -> Iterator[tuple[float, int, float]]:
    """Factors, original contexts and upper bounds that might have given the divisors."""
    factor = _rounded(float(divisors.max()))
    for original in (*_PUBLISHED, max_seq_len, round(max_seq_len / factor)):
        yield factor, original, 4.0
    # How far each pair is kept: (turns - 1) / (high - 1), with turns = original * frequency / (2 pi).
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = ((kept > _TOLERANCE) & (kept < 1 - _TOLERANCE)).nonzero().flatten()
    if not len(between):
        return
    first, last = int(between[0]), int(between[-1])
    yield factor, round((3 * float(kept[first]) + 1) * 2 * math.pi / float(plain[first])), 4.0
    if first == last:
        return
    # A line through two pairs: kept = slope * frequency - 1 / (high - 1).
    slope = float((kept[first] - kept[last]) / (plain[first] - plain[last]))
    offset = slope * float(plain[first]) - float(kept[first])
    if slope > 0 and offset > 0:
        high = _rounded(1 + 1 / offset)
        yield factor, round(slope * (high - 1) * 2 * math.pi), high


def _gives(settings: dict[str, Any], divisors: Tensor, plain: Tensor, base: float) -> bool:
    try:
        scaling = validate(RotaryScaling, settings)
    except ConfigError:
        return False
    scaled, _ = rotary_frequencies(2 * len(divisors), base, scaling)
    return bool(((plain / scaled - divisors).abs() <= _TOLERANCE * divisors).all())


def _rounded(number: float) -> float:
    """The number with few digits that single precision hardly tells from `number`."""
    return float(f"{number:.5g}")
