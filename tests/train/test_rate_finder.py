"""The range test against losses whose best rate is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sheepop.train.rate_finder import RangeTestError, find_learning_rate


def quadratic(curvature: float, start: float = 1.0) -> Callable[[float], float]:
    """Gradient descent on ``curvature x^2 / 2``; it diverges for rates above 2 / curvature."""
    place = start

    def step(rate: float) -> float:
        nonlocal place
        loss = 0.5 * curvature * place**2
        place -= rate * curvature * place
        return loss

    return step


@pytest.mark.parametrize("curvature", [0.01, 1.0, 300.0])
def test_on_a_quadratic_the_suggestion_is_where_the_loss_falls_fastest(curvature: float) -> None:
    """Rates in the ratio q: ``loss = exp(-2 h r / ln q)``, which falls fastest against ln r at ``r = ln q / 2 h``."""
    start, end, num_steps = 1e-4 / curvature, 100 / curvature, 400
    test = find_learning_rate(quadratic(curvature), start=start, end=end, num_steps=num_steps)
    log_ratio = math.log(end / start) / (num_steps - 1)
    assert test.suggestion == pytest.approx(log_ratio / (2 * curvature), rel=0.15)
    assert test.diverged is not None
    assert 2 / curvature < test.diverged < end


def test_a_curvature_ten_times_as_large_gives_a_tenth_of_the_rate() -> None:
    flat, steep = (find_learning_rate(quadratic(h), start=1e-4 / h, end=100 / h, num_steps=200) for h in (1.0, 10.0))
    assert (steep.suggestion, steep.lowest) == pytest.approx((flat.suggestion / 10, flat.lowest / 10))


def test_rates_grow_by_one_factor_and_losses_are_those_of_the_steps() -> None:
    heard: list[tuple[float, float]] = []
    losses = iter([8.0, 7.5, 7.0, 6.0, 5.0, 4.5, 4.2, 4.1, 4.0, 3.9, 3.8])
    test = find_learning_rate(
        lambda rate: next(losses),
        start=1e-5,
        end=1.0,
        num_steps=11,
        on_step=lambda rate, loss: heard.append((rate, loss)),
    )
    assert test.rates == pytest.approx([10 ** (-5 + i / 2) for i in range(11)])
    assert heard == list(zip(test.rates, test.losses, strict=True))
    assert test.diverged is None


def test_smoothing_is_the_mean_of_the_running_means_from_both_ends() -> None:
    rng = np.random.default_rng(0)
    values = (5 - np.linspace(0, 2, 40) + rng.normal(0, 0.1, 40)).tolist()
    rest = iter(values)
    test = find_learning_rate(lambda rate: next(rest), start=1e-5, end=1.0, num_steps=40)
    for place in range(40):
        left = np.array([0.9 ** (place - j) for j in range(place + 1)])
        right = np.array([0.9 ** (j - place) for j in range(place, 40)])
        means = [left @ values[: place + 1] / left.sum(), right @ values[place:] / right.sum()]
        assert test.smoothed[place] == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_test(bad: float) -> None:
    losses = iter([5.0 - 0.1 * i for i in range(20)] + [bad, 1.0])
    test = find_learning_rate(lambda rate: next(losses), start=1e-5, end=1.0, num_steps=101)
    assert len(test.losses) == 20
    assert test.diverged == pytest.approx(10 ** (-5 + 20 / 20))
    assert next(losses) == 1.0


def test_a_loss_that_never_falls_is_refused_with_a_remedy() -> None:
    losses = iter(range(1, 1000))
    with pytest.raises(RangeTestError, match=r"did not fall at any learning rate from 0\.1 on\. Start lower"):
        find_learning_rate(lambda rate: float(next(losses)), start=0.1, end=1.0, num_steps=50)


@pytest.mark.parametrize(("start", "end", "steps"), [(0.0, 1.0, 50), (1.0, 0.1, 50), (0.1, 1.0, 3)])
def test_a_test_that_makes_no_sense_is_refused(start: float, end: float, steps: int) -> None:
    with pytest.raises(ValueError, match="needs 0 < start < end and 10 steps"):
        find_learning_rate(lambda rate: 1.0, start=start, end=end, num_steps=steps)
