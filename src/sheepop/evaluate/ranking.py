"""Strengths of models from comparisons of two at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.random import numpy_generator

_MEAN, _SCALE = 1000.0, 400 / math.log(10)
# Draws of every pair that met, beside what was seen: whoever always wins has a finite strength.
_PRIOR = 0.5
_ITERATIONS, _TOLERANCE, _LONGEST_STEP = 200, 1e-10, 2.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """A comparison: `score` is 1 where the first was better, 0 where the second was, 0.5 for a tie."""

    first: str
    second: str
    score: float


@dataclass(frozen=True)
class Rated:
    """A model's strength with its 95 percent interval, and its games: a tie is half a win."""

    name: str
    strength: float
    interval: tuple[float, float]
    games: int
    win_rate: float


def bradley_terry(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The strengths under which these outcomes are likeliest, on the scale of Elo with mean 1000.

    A model that is 400 stronger than another is 10 times as likely to win as to lose. Ties count as half a win for each
    (Bradley and Terry 1952); every pair that met has half a draw more than was seen. Raises `DataError` unless every
    model can be compared with every other, through others perhaps.
    """
    names = sorted({name for outcome in outcomes for name in (outcome.first, outcome.second)})
    _require_connected(names, outcomes)
    place = {name: number for number, name in enumerate(names)}
    wins = np.zeros((len(names), len(names)))
    for outcome in outcomes:
        one, other = place[outcome.first], place[outcome.second]
        wins[one, other] += outcome.score
        wins[other, one] += 1 - outcome.score
    return dict(zip(names, _strengths(wins).tolist(), strict=True))


def rank(outcomes: Sequence[Outcome], *, seed: int = 0, resamples: int = 300) -> list[Rated]:
    """All models, the strongest first; intervals are of a bootstrap over outcomes. Raises `DataError` as above."""
    strengths = bradley_terry(outcomes)
    names = list(strengths)
    place = {name: number for number, name in enumerate(names)}
    firsts, seconds = (np.array([place[getattr(found, end)] for found in outcomes]) for end in ("first", "second"))
    scores = np.array([outcome.score for outcome in outcomes])
    draw, count = numpy_generator(seed, "ranking"), len(outcomes)
    met = np.zeros((len(names), len(names)))
    np.add.at(met, (firsts, seconds), 1.0)
    drawn = []
    for _ in range(resamples):
        chosen = draw.integers(0, count, count)
        wins = np.zeros_like(met)
        np.add.at(wins, (firsts[chosen], seconds[chosen]), scores[chosen])
        np.add.at(wins, (seconds[chosen], firsts[chosen]), 1 - scores[chosen])
        drawn.append(_strengths(wins, met + met.T))
    lows, highs = np.percentile(np.stack(drawn), [2.5, 97.5], axis=0)
    rated = []
    for number, name in enumerate(names):
        won = float(scores[firsts == number].sum() + (1 - scores[seconds == number]).sum())
        games = int((firsts == number).sum() + (seconds == number).sum())
        interval = (float(lows[number]), float(highs[number]))
        rated.append(Rated(name, strengths[name], interval, games, won / games))
    return sorted(rated, key=lambda each: -each.strength)


def _strengths(wins: Floats, met: Floats | None = None) -> Floats:
    """Newton's steps to the highest likelihood, with the prior's draws among those that `met`, by default in `wins`."""
    games = wins + wins.T
    prior = _PRIOR * ((games if met is None else met) > 0)
    wins, games = wins + prior / 2, games + prior
    logs = np.zeros(len(wins))
    for _ in range(_ITERATIONS):
        chance = 1 / (1 + np.exp(logs[None, :] - logs[:, None]))
        gradient = (wins - games * chance).sum(1)
        weight = games * chance * (1 - chance)
        # Only differences count: the ones fix the sum.
        curvature = np.diag(weight.sum(1)) - weight + 1.0
        step = np.clip(np.linalg.solve(curvature, gradient), -_LONGEST_STEP, _LONGEST_STEP)
        logs += step - step.mean()
        if float(np.abs(step).max()) < _TOLERANCE:
            break
    found: Floats = _MEAN + _SCALE * logs
    return found


def _require_connected(names: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    if len(names) < 2:
        raise DataError("A ranking needs comparisons of two models at least.")
    group = {name: {name} for name in names}
    for outcome in outcomes:
        if group[outcome.first] is not group[outcome.second]:
            together = group[outcome.first] | group[outcome.second]
            group.update(dict.fromkeys(together, together))
    first = group[names[0]]
    if apart := [name for name in names if name not in first]:
        raise DataError(
            f"{', '.join(sorted(first))} and {', '.join(apart)} were never compared, not even through others. "
            "Compare some of them before you rank them together."
        )
