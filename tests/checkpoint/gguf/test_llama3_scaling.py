"""Llama 3's scaling is found again from the divisors that a file has in its place."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.gguf.rotary import find_llama3_scaling
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling


def divisors_of(dim: int, base: float, factor: float, original: int, low: float, high: float) -> list[float]:
    """Pair by pair, from wavelengths, as Llama 3.1 was described."""
    found = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048), (16.0, 32768)])
def test_published_scalings_are_found_exactly(factor: float, original: int) -> None:
    divisors = torch.tensor(divisors_of(128, 500000.0, factor, original, 1.0, 4.0), dtype=torch.float32).double()
    assert find_llama3_scaling(divisors, 500000.0, 131072) == {
        "kind": "llama3",
        "factor": factor,
        "original_max_seq_len": original,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


@given(
    dim=st.sampled_from([8, 16, 64, 128]),
    base=st.sampled_from([100.0, 10000.0, 500000.0]),
    factor=st.sampled_from([2.0, 5.5, 8.0]),
    original=st.integers(64, 20000),
    low=st.sampled_from([1.0, 2.0]),
    ratio=st.sampled_from([2.0, 3.5, 4.0]),
)
@example(dim=16, base=10000.0, factor=2.0, original=1761, low=1.0, ratio=3.5)  # one pair between the bounds
@settings(max_examples=40)
def test_what_is_found_turns_as_the_file_says(
    dim: int, base: float, factor: float, original: int, low: float, ratio: float
) -> None:
    divisors = torch.tensor(divisors_of(dim, base, factor, original, low, low * ratio)).double()
    # A file in which no pair is interpolated to the end does not show the factor.
    assume(float(divisors.max()) == factor)
    found = find_llama3_scaling(divisors, base, 32768)
    # Without a pair between the bounds, or with bounds that are no whole contexts, nothing may be found: never another.
    if found is not None:
        plain, _ = rotary_frequencies(dim, base)
        scaled, _ = rotary_frequencies(dim, base, RotaryScaling(**found))
        torch.testing.assert_close(plain / scaled, divisors, rtol=1e-4, atol=0)
    elif low == 1.0 and original >= 1024 and any(1 < divisor < factor for divisor in divisors.tolist()):
        pytest.fail("a scaling with whole numbers was not found")


@pytest.mark.parametrize(
    "divisors",
    [
        [1.0, 2.0, 1.0, 8.0],  # not in order
        [1.0, 0.5, 0.25, 0.1],  # faster, not slower
        [1.0, math.nan, 8.0, 8.0],
        [1.0, 2.0, 8.0, math.inf],
        [1.0, -3.0, 8.0, 8.0],
        [3.0, 3.5, 3.9, 4.0],  # a longrope: none is kept
    ],
)
def test_other_divisors_are_no_scaling_of_llama_3(divisors: list[float]) -> None:
    assert find_llama3_scaling(torch.tensor(divisors, dtype=torch.float64), 10000.0, 4096) is None
