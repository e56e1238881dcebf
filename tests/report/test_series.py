from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.report.series import number, series, smooth

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=40)


def slow_average(values: list[float | None], span: float) -> list[float | None]:
    """The definition: weights that fall by the same factor with each number further back, divided by their sum."""
    decay = 1 - 2 / (span + 1)
    result: list[float | None] = []
    for end, value in enumerate(values):
        if value is None:
            result.append(None)
            continue
        past = [x for x in values[: end + 1] if x is not None]
        weights = [decay**back for back in range(len(past) - 1, -1, -1)]
        result.append(math.fsum(w * x for w, x in zip(weights, past, strict=True)) / math.fsum(weights))
    return result


@given(VALUES, st.floats(1, 50))
def test_smoothing_equals_its_definition(values: list[float | None], span: float) -> None:
    for found, wanted in zip(smooth(values, span), slow_average(values, span), strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-6)


def test_smoothing_by_hand() -> None:
    # span 3 halves the weight with each step back: (1*4 + 0.5*1) / 1.5 = 3, (1*2 + 0.5*4 + 0.25*1) / 1.75
    assert smooth([1.0, 4.0, None, 2.0], 3) == [1.0, 3.0, None, pytest.approx(17 / 7)]


def test_span_one_changes_nothing_and_less_is_refused() -> None:
    assert smooth([3.0, None, -1.0], 1) == [3.0, None, -1.0]
    with pytest.raises(ValueError, match="span"):
        smooth([1.0], 0.5)


def test_series_takes_one_split_and_keeps_gaps() -> None:
    rows = [
        {"step": 1, "split": "train", "loss": 5},
        {"step": 2, "split": "validation", "loss": 4.5},
        {"step": 3, "split": "train", "loss": None},
        {"step": 4, "split": "train", "learning_rate": 1.0},
        {"step": None, "split": "train", "loss": 1.0},
        {"split": "train", "loss": 1.0},
        {"step": 5, "split": "train", "loss": "4"},
        {"step": 6, "split": "train", "loss": 3.5},
    ]
    found = series(rows, "train", "loss")
    assert found.steps == [1, 3, 5, 6]
    assert found.values == [5.0, None, None, 3.5]


@pytest.mark.parametrize(
    "value", [None, True, "1", [1], float("nan"), float("inf"), pytest.param(10**400, id="a huge integer")]
)
def test_what_is_no_finite_number(value: object) -> None:
    assert number(value) is None


def test_smoothing_waits_for_ten_numbers() -> None:
    rows = [{"step": step, "split": "train", "loss": 1.0 if step != 3 else None} for step in range(11)]
    assert series(rows[:10], "train", "loss").smoothed() is None
    average = series(rows, "train", "loss").smoothed()
    assert average is not None
    assert average.values == [1.0, 1.0, 1.0, None, *[1.0] * 7]
