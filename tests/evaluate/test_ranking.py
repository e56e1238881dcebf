"""Strengths of models: by hand, and where the likelihood of the outcomes is highest."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from sheepop.core.errors import DataError
from sheepop.evaluate.ranking import Outcome, rank


def strengths(outcomes: list[Outcome]) -> dict[str, float]:
    return {each.name: each.strength for each in rank(outcomes, resamples=1)}


def test_two_models_by_hand() -> None:
    outcomes = [Outcome("a", "b", 1.0)] * 6 + [Outcome("b", "a", 1.0)] * 2 + [Outcome("a", "b", 0.5)]
    # 6.5 wins and 2.5, and a quarter more for each.
    apart = 400 * math.log10(6.75 / 2.75)
    found = strengths(outcomes)
    assert found["a"] == pytest.approx(1000 + apart / 2)
    assert found["b"] == pytest.approx(1000 - apart / 2)


def test_strengths_are_where_the_likelihood_is_highest() -> None:
    draw = Random(3)
    names, true = ["p", "q", "r", "s"], {"p": 0.9, "q": 0.2, "r": -0.3, "s": -0.8}
    outcomes = []
    for _ in range(120):
        one, other = draw.sample(names, 2)
        chance = 1 / (1 + math.exp(true[other] - true[one]))
        outcomes.append(Outcome(one, other, draw.choices([1.0, 0.0, 0.5], [chance, 1 - chance, 0.2])[0]))
    games = [(found.first, found.second, found.score) for found in outcomes]
    met = {frozenset((one, other)) for one, other, _ in games}
    games += [(*sorted(pair), 0.5) for pair in met for _ in range(1)]  # type: ignore[misc]
    weights = [1.0] * len(outcomes) + [0.5] * len(met)
    theta = np.zeros(4)
    for _ in range(20_000):
        gradient = np.zeros(4)
        for (one, other, score), weight in zip(games, weights, strict=True):
            i, j = names.index(one), names.index(other)
            chance = 1 / (1 + np.exp(theta[j] - theta[i]))
            gradient[i] += weight * (score - chance)
            gradient[j] -= weight * (score - chance)
        theta += 0.02 * gradient
        if np.abs(gradient).max() < 1e-9:
            break
    expected = 1000 + 400 / math.log(10) * (theta - theta.mean())
    assert [strengths(outcomes)[name] for name in names] == pytest.approx(expected.tolist(), abs=1e-3)


def test_whoever_wins_all_has_a_finite_strength_and_an_interval() -> None:
    outcomes = [Outcome("a", "b", 1.0)] * 20 + [Outcome("b", "c", 1.0)] * 15 + [Outcome("c", "b", 1.0)] * 5
    first, second, third = rank(outcomes)
    assert (first.name, second.name, third.name) == ("a", "b", "c")
    assert math.isfinite(first.strength)
    assert (first.games, first.win_rate, second.games, second.win_rate) == (20, 1.0, 40, 15 / 40)
    for each in (first, second, third):
        assert each.interval[0] <= each.strength <= each.interval[1]
    assert rank(outcomes) == rank(list(outcomes))


def test_intervals_are_as_wide_as_the_number_of_prompts_makes_them() -> None:
    """Every prompt decides four comparisons alike, so 25 prompts say as much as 25 comparisons and not as 100."""
    draw = Random(5)
    prompts = [Outcome("a", "b", float(draw.random() < 0.6)) for _ in range(25)]
    names = [str(number) for number in range(25)]
    outcomes, clusters = prompts * 4, names * 4
    (low, high), (low_of_prompts, high_of_prompts), (low_if_apart, high_if_apart) = (
        next(each.interval for each in found if each.name == "a")
        for found in (
            rank(outcomes, clusters=clusters, resamples=2_000),
            rank(prompts, resamples=2_000),
            rank(outcomes, resamples=2_000),
        )
    )
    # The half draw that a pair that met has in addition matters less beside more games.
    assert (low, high) == pytest.approx((low_of_prompts, high_of_prompts), abs=4)
    assert (high - low) / (high_if_apart - low_if_apart) == pytest.approx(2, rel=0.1)


def test_models_that_never_met_are_not_ranked() -> None:
    with pytest.raises(DataError, match="a, b and c, d were never compared"):
        strengths([Outcome("a", "b", 1.0), Outcome("c", "d", 0.0)])
    with pytest.raises(DataError, match="at least two models"):
        strengths([])
