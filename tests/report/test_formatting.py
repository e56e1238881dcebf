from __future__ import annotations

import math

import pytest

from sheepop.report import MISSING, data_size, duration, flops, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        ([], "–"),
        (math.nan, "–"),
        (0, "0"),
        (0.0, "0"),
        (False, "no"),
        (1234567, "1,234,567"),
        (1234.5678, "1,235"),
        (0.78125, "0.7812"),
        (0.00002, "2.000e-05"),
        (-math.inf, "−∞"),
        ((1, None, "x"), "1, –, x"),
        (10**20, "1.000e+20"),
        (10**400, "more than 1e308"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (303.2, "5 min 03 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (100 * 3600, "4 d 04 h"),
        (None, "–"),
        (-1.0, "–"),
        (math.inf, "–"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (26_123_456, "26.1 MB"), (999_600_000, "1 GB"), (None, "–")],
)
def test_sizes(size: float | None, text: str) -> None:
    assert data_size(size) == text


def test_sizes_beyond_gigabytes() -> None:
    assert data_size(2.5e12) == "2.5 TB"


@pytest.mark.parametrize(
    ("rate", "text"), [(93.1e9, "93.1 GFLOP/s"), (989.4e12, "989 TFLOP/s"), (1e12, "1 TFLOP/s"), (None, MISSING)]
)
def test_rates_of_operations(rate: float | None, text: str) -> None:
    assert flops(rate) == text
