"""The calibration error, by hand and as a loop over bins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.evaluate.report import reliability_figure
from sheepop.evaluate.statistics import reliability
from sheepop.report import save_png


def test_by_hand() -> None:
    found = reliability([0.95, 0.85, 0.85, 1.0, 0.0], [True, True, False, False, False])
    # Bin 0: sure 0, right 0. Bin 8: sure 0.85, right 0.5. Bin 9: sure 0.975, right 0.5.
    assert found.ece == pytest.approx(2 / 5 * 0.35 + 2 / 5 * 0.475)
    assert [each.count for each in found.bins] == [1, 0, 0, 0, 0, 0, 0, 0, 2, 2]
    assert (found.bins[8].confidence, found.bins[8].accuracy) == pytest.approx((0.85, 0.5))
    assert found.bins[3].accuracy is None


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60), st.integers(1, 15))
def test_as_a_loop(pairs: list[tuple[float, bool]], bins: int) -> None:
    error, counted = 0.0, 0
    for number in range(bins):
        inside = [(sure, right) for sure, right in pairs if min(int(sure * bins), bins - 1) == number]
        counted += len(inside)
        if inside:
            error += abs(sum(sure for sure, _ in inside) - sum(right for _, right in inside)) / len(pairs)
    found = reliability([sure for sure, _ in pairs], [right for _, right in pairs], bins)
    assert found.ece == pytest.approx(error)
    assert sum(each.count for each in found.bins) == counted == len(pairs)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    save_png(reliability_figure(reliability([0.2, 0.7, 0.9], [False, True, True])), tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sure", [[1.2], [-0.1], [float("nan")], [], [0.5, 0.5]])
def test_what_is_no_probability_is_refused(sure: list[float]) -> None:
    with pytest.raises(ValueError):
        reliability(sure, [True])
