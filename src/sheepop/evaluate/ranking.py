"""Strengths of models, estimated from pairwise comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sheepop.core.errors import DataError
from sheepop.evaluate.statistics import Floats, bootstrap, logistic_regression

_MEAN, _SCALE = 1000.0, 400 / math.log(10)
_PRIOR = 0.5  # draws added to every pair that met, so that a model which always wins has a finite strength


@dataclass(frozen=True)
class Outcome:
    """A comparison: `score` is 1 if the first model was better, 0 if the second was, 0.5 for a tie."""

    first: str
    second: str
    score: float


@dataclass(frozen=True)
class Rated:
    """A model's strength, its 95 percent interval, and its games; a tie counts as half a win."""

    name: str
    strength: float
    interval: tuple[float, float]
    games: int
    win_rate: float


def rank(outcomes: Sequence[Outcome], *, seed: int = 0, resamples: int = 300) -> list[Rated]:
    """All models with their strengths under which the outcomes are likeliest (Bradley and Terry 1952), strongest first.

    Strengths are on the scale of Elo with mean 1000: 400 more are 10 times the odds. A tie is half a win for each, and
    every pair that met gets half a draw more than observed. Intervals come from a bootstrap over outcomes. Raises
    `DataError` unless every model can be compared with every other, perhaps through others.
    """
    names = sorted({name for outcome in outcomes for name in (outcome.first, outcome.second)})
    _require_connected(names, outcomes)
    place = {name: number for number, name in enumerate(names)}
    firsts, seconds = (np.array([place[getattr(outcome, end)] for outcome in outcomes]) for end in ("first", "second"))
    scores = np.array([outcome.score for outcome in outcomes])
    pairs, pair_of = np.unique(
        np.minimum(firsts, seconds) * len(names) + np.maximum(firsts, seconds), return_inverse=True
    )
    scores_of_lower = np.where(firsts < seconds, scores, 1 - scores)
    models = np.eye(len(names))
    sides = models[pairs // len(names)] - models[pairs % len(names)]
    # Only differences count; this penalty fixes their sum at 0.
    penalty = np.ones((len(names), len(names)))

    def strengths(times: Floats) -> Floats:
        games = np.bincount(pair_of, times) + _PRIOR
        wins = np.bincount(pair_of, times * scores_of_lower) + _PRIOR / 2
        found: Floats = _MEAN + _SCALE * logistic_regression(sides, wins / games, games, penalty)
        return found

    found = strengths(np.ones(len(outcomes)))
    lows, highs = np.percentile(bootstrap(strengths, len(outcomes), seed, "ranking", resamples), [2.5, 97.5], axis=0)
    rated = []
    for number, name in enumerate(names):
        won = float(scores[firsts == number].sum() + (1 - scores[seconds == number]).sum())
        games = int((firsts == number).sum() + (seconds == number).sum())
        interval = (float(lows[number]), float(highs[number]))
        rated.append(Rated(name, float(found[number]), interval, games, won / games))
    return sorted(rated, key=lambda each: -each.strength)


def _require_connected(names: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    if len(names) < 2:
        raise DataError("A ranking needs comparisons of at least two models.")
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
