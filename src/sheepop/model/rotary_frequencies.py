"""The rotation frequency of each rotary pair, without scaling and with each `RotaryScaling`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sheepop.model.rotary_scaling import RotaryScaling


def rotary_frequencies(rotary_dim: int, base: float, scaling: RotaryScaling | None = None) -> tuple[Tensor, float]:
    """Returns the angles per position (rotary_dim / 2), float64, and a factor for their cosines and sines.

    Without `scaling` pair i rotates by ``base^(-2i / rotary_dim)`` per position (Su et al. 2021, section 3.2.2).
    """
    if scaling is None:
        return _plain(rotary_dim, base), 1.0
    match scaling.kind:
        case "linear":
            return _plain(rotary_dim, base) / scaling.factor, 1.0
        case "ntk":
            # A single pair is the fastest one, which is not scaled.
            exponent = rotary_dim / (rotary_dim - 2) if rotary_dim > 2 else 0.0
            return _plain(rotary_dim, base * scaling.factor**exponent), 1.0
        case "yarn":
            assert scaling.attention_factor is not None
            return _yarn(rotary_dim, base, scaling), scaling.attention_factor
        case "llama3":
            return _llama3(_plain(rotary_dim, base), scaling), 1.0
        case "proportional":
            assert scaling.fraction is not None
            frequencies = _plain(rotary_dim, base) / scaling.factor
            frequencies[int(scaling.fraction * rotary_dim / 2) :] = 0.0
            return frequencies, 1.0
        case "longrope":
            assert scaling.pair_factors is not None and scaling.attention_factor is not None
            factors = torch.tensor(scaling.pair_factors, dtype=torch.float64, device="cpu")
            return _plain(rotary_dim, base) / factors, scaling.attention_factor


def _plain(rotary_dim: int, base: float) -> Tensor:
    # An explicit device, so that the angles have values even if the network is built on the meta device.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    return base**-exponents


def _yarn(rotary_dim: int, base: float, scaling: RotaryScaling) -> Tensor:
    original, beta_fast, beta_slow = scaling.original_max_seq_len, scaling.beta_fast, scaling.beta_slow
    assert original is not None and beta_fast is not None and beta_slow is not None

    def pair_that_turns(times: float) -> float:
        """Returns the (fractional) index of the pair that makes `times` turns over the original context."""
        return rotary_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    # A ramp of width 0 would divide by zero.
    interpolated = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    kept = _plain(rotary_dim, base)
    return kept / scaling.factor * interpolated + kept * (1 - interpolated)


def _llama3(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    original, low, high = scaling.original_max_seq_len, scaling.low_freq_factor, scaling.high_freq_factor
    assert original is not None and low is not None and high is not None
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
