"""What counts as trouble, against hand-worked numbers and SciPy-free loops over sorted values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.train.trouble import Limits, TroubleConfig, Window, find_trouble, robust_z_score

CONFIG = TroubleConfig(window=16, threshold=8.0)


def full(losses: list[float], norms: list[float] | None = None) -> Window:
    return Window(tuple(losses), tuple(norms or [1.0 + 0.01 * n for n in range(len(losses))]))


def test_the_score_of_a_hand_worked_window() -> None:
    # Median 3, absolute deviations 2 1 0 1 2 with the median 1: (10 - 3) / 1.4826.
    assert robust_z_score(10.0, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(7 / 1.4826)
    assert robust_z_score(1.0, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(-2 / 1.4826)


@given(st.lists(st.floats(-5, 5), min_size=9, max_size=40), st.floats(1e3, 1e6))
def test_one_wild_value_in_the_window_hardly_moves_the_score(values: list[float], wild: float) -> None:
    calm = [2.0 + 0.1 * math.sin(index) for index in range(len(values))]
    spoiled = [wild, *calm[1:]]
    assert robust_z_score(20.0, spoiled) == pytest.approx(robust_z_score(20.0, calm), rel=0.6)


def test_equal_values_do_not_make_rounding_a_spike() -> None:
    assert robust_z_score(2.0 + 1e-7, [2.0] * 20) < 1


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_no_number_is_trouble_from_the_first_step(loss: float, norm: float) -> None:
    trouble = find_trouble(loss, norm, Window(), CONFIG)
    assert trouble is not None
    assert (trouble.kind, trouble.policy) == ("non-finite", CONFIG.non_finite)


def test_a_spike_is_told_from_the_steps_before() -> None:
    calm = full([2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 2.1, 1.9] * 2)
    assert find_trouble(2.2, 1.05, calm, CONFIG) is None
    assert find_trouble(0.1, 1e-6, calm, CONFIG) is None  # far below is no trouble
    by_loss = find_trouble(4.0, 1.05, calm, CONFIG)
    assert by_loss is not None
    assert by_loss.kind == "spike"
    assert "loss 4.0000" in by_loss.words
    by_norm = find_trouble(2.0, 50.0, calm, CONFIG)
    assert by_norm is not None
    assert "gradient norm 50" in by_norm.words


@pytest.mark.parametrize(("threshold", "is_trouble"), [(2.6, True), (2.75, False)])
def test_norms_are_compared_by_their_logarithms(threshold: float, is_trouble: bool) -> None:
    # In powers of two: median 2, deviations 2 1 0 1 2 with the median 1. So 2^6 scores (6 - 2) / 1.4826 = 2.698.
    window = full([2.0] * 20, [1.0, 2.0, 4.0, 8.0, 16.0] * 4)
    found = find_trouble(2.0, 64.0, window, TroubleConfig(window=16, threshold=threshold))
    assert (found is not None) == is_trouble
    assert found is None or found.words == "gradient norm 64, 2.7 robust deviations above the median"


def test_a_norm_of_zero_is_no_trouble() -> None:
    assert find_trouble(2.0, 0.0, full([2.0] * 16), CONFIG) is None
    assert find_trouble(2.0, 0.0, full([2.0] * 16, [0.0] * 16), CONFIG) is None


def test_the_smallest_spread_is_a_thousandth_of_the_median_or_of_one() -> None:
    assert robust_z_score(1000.5, [1000.0] * 9) == pytest.approx(0.5)
    assert robust_z_score(0.002, [0.0] * 9) == pytest.approx(2.0)


def test_spikes_are_not_looked_for_before_half_of_the_window_is_there() -> None:
    assert find_trouble(1e6, 1.0, full([2.0, 2.1] * 3), CONFIG) is None
    assert find_trouble(1e6, 1.0, full([2.0, 2.1] * 4), CONFIG) is not None
    assert find_trouble(1e6, 1.0, full([2.0, 2.1] * 8), TroubleConfig(window=16, spike="ignore")) is None


def test_a_window_keeps_the_last_steps() -> None:
    window = Window()
    for number in range(5):
        window = window.after(float(number), float(-number), 3)
    assert window == Window((2.0, 3.0, 4.0), (-2.0, -3.0, -4.0))


POSITIVE = st.floats(1e-20, 1e20)


@given(st.lists(st.tuples(st.floats(-100, 100), POSITIVE), min_size=8, max_size=16), st.floats(1.1, 50))
def test_limits_known_before_a_step_are_to_the_last_bit_where_trouble_begins(
    steps: list[tuple[float, float]], threshold: float
) -> None:
    window, config = Window(*zip(*steps, strict=True)), TroubleConfig(window=16, threshold=threshold)
    limits = Limits.of(window, config)
    calm_loss, calm_norm = sorted(window.losses)[0], sorted(window.norms)[0]
    above_loss, above_norm = (math.nextafter(limit, math.inf) for limit in (limits.loss, limits.norm))
    for loss, norm in ((limits.loss, calm_norm), (above_loss, calm_norm), (calm_loss, min(limits.norm, 1e300))):
        assert limits.allow(loss, norm) == (find_trouble(loss, norm, window, config) is None) == (loss <= limits.loss)
    if math.isfinite(limits.norm):
        assert not limits.allow(calm_loss, above_norm)
        assert find_trouble(calm_loss, above_norm, window, config) is not None


@pytest.mark.parametrize("window", [Window(), full([2.0, 2.1] * 3)])
def test_without_a_window_to_compare_with_only_what_is_no_number_is_denied(window: Window) -> None:
    limits = Limits.of(window, CONFIG)
    assert limits.allow(1e30, 1e30)
    assert not any(limits.allow(*pair) for pair in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)))
