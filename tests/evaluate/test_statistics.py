"""Intervals and tests, against scipy, against enumeration, and against what they promise."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.evaluate.statistics import (
    mcnemar,
    mean_interval,
    paired_bootstrap,
    pass_at_k,
    ratio_interval,
    seeds_interval,
    share_interval,
    student_quantile,
)

stats = pytest.importorskip("scipy.stats")


@given(st.integers(1, 400), st.data())
def test_shares_have_the_interval_of_wilson(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    expected = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert share_interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_bootstrap_of_few_items_is_that_of_all_draws() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    means = [sum(draw) / 4 for draw in product(values, repeat=4)]
    low, high = np.percentile(means, [2.5, 97.5], method="inverted_cdf")
    assert mean_interval(values, resamples=60_000) == (low, high)
    assert mean_interval(values) == mean_interval(values)
    assert mean_interval([4.0]) == (4.0, 4.0)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(5)
    held = 0
    for seed in range(300):
        sizes = draw.integers(1, 30, 60)
        bits = sizes * (2.0 + 0.5 * draw.standard_normal(60))
        low, high = ratio_interval(bits, sizes, seed=seed, resamples=400)
        held += low <= 2.0 <= high
    assert 270 <= held <= 296  # 285 of 300, give or take 3 deviations


def test_equal_models_differ_as_often_as_p_says() -> None:
    draw = np.random.default_rng(6)
    found = 0
    for seed in range(400):
        both = draw.standard_normal((2, 50))
        found += paired_bootstrap(both[0], both[1], seed=seed, resamples=300).p < 0.05
    assert 8 <= found <= 36  # 20 of 400, give or take 3 deviations and the bootstrap's own error


def test_a_weighted_difference_is_that_of_the_weighted_means() -> None:
    found = paired_bootstrap([1.0, 3.0, 5.0], [2.0, 2.0, 2.0], [1.0, 1.0, 8.0])
    assert found.value == pytest.approx((1 + 3 + 40) / 10 - 2)
    assert found.interval[0] <= found.value <= found.interval[1]
    assert paired_bootstrap([1.0, 2.0], [1.0, 2.0]).p == 1.0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120))
def test_mcnemar_is_the_exact_binomial_test_of_the_pairs_that_differ(pairs: list[tuple[bool, bool]]) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    found = mcnemar(ours, theirs)
    gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert found.p == pytest.approx(expected)
    assert found.value == pytest.approx((gained - lost) / len(pairs))
    assert found.interval[0] <= found.value + 1e-12 and found.value - 1e-12 <= found.interval[1]


def test_the_interval_of_paired_shares_is_newcombes() -> None:
    # Newcombe 1998, table II: 36 both, 12 gained, 2 lost, 0 neither.
    ours, theirs = [True] * 48 + [False] * 2, [True] * 36 + [False] * 12 + [True] * 2
    assert mcnemar(ours, theirs).interval == pytest.approx((0.0569, 0.3404), abs=5e-4)


@pytest.mark.parametrize(("count", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3), (9, 1)])
def test_pass_at_k_is_the_share_of_draws_with_one_that_is_right(count: int, right: int) -> None:
    samples = [True] * right + [False] * (count - right)
    for k in range(1, count + 1):
        draws = [any(chosen) for chosen in combinations(samples, k)]
        assert pass_at_k(count, right, k) == pytest.approx(sum(draws) / len(draws))
    assert pass_at_k(5000, 1, 100) == pytest.approx(0.02)


def test_seeds_have_the_interval_of_student() -> None:
    for freedom in (*range(1, 12), 30, 101):
        assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-6)
    values = [0.5, 0.6, 0.8]
    expected = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert seeds_interval(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mean_interval([]),
        lambda: share_interval(1, 0),
        lambda: share_interval(3, 2),
        lambda: ratio_interval([1.0], [0.0]),
        lambda: ratio_interval([1.0], [1.0, 2.0]),
        lambda: pass_at_k(3, 1, 4),
        lambda: pass_at_k(3, 4, 1),
        lambda: seeds_interval([1.0]),
        lambda: mcnemar([True], []),
    ],
)
def test_what_has_no_answer_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError):
        wrong()  # type: ignore[operator]
