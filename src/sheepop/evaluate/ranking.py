"""Strengths of models, estimated from pairwise comparisons such as the blind votes of people in an arena."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.core.errors import DataError
from sheepop.core.json_lines import json_rows
from sheepop.evaluate.statistics import Floats, bootstrap, logistic_regression

CHOICES = {"left": 1.0, "right": 0.0, "tie": 0.5, "neither": 0.5}
"""The possible votes, and their scores for the model on the left; "neither" means that both answers are bad."""
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


def rank(
    outcomes: Sequence[Outcome], *, clusters: Sequence[str] | None = None, seed: int = 0, resamples: int = 300
) -> list[Rated]:
    """All models with their maximum-likelihood strengths (Bradley and Terry 1952), strongest first.

    Strengths are on the scale of Elo with mean 1000: 400 more are 10 times the odds. A tie is half a win for each, and
    every pair that met gets half a draw in addition. Intervals come from a bootstrap over `clusters`, which name what
    outcomes depend on together, such as their prompt; by default over outcomes. Raises `DataError` unless every model
    can be compared with every other, perhaps through others.
    """
    names = sorted({name for outcome in outcomes for name in (outcome.first, outcome.second)})
    _require_connected(names, outcomes)
    place = {name: number for number, name in enumerate(names)}
    firsts, seconds = (np.array([place[getattr(outcome, end)] for outcome in outcomes]) for end in ("first", "second"))
    scores = np.array([outcome.score for outcome in outcomes])
    lower, higher = np.minimum(firsts, seconds), np.maximum(firsts, seconds)
    pairs, pair_of = np.unique(lower * len(names) + higher, return_inverse=True)
    scores_of_lower = np.where(firsts < seconds, scores, 1 - scores)
    models = np.eye(len(names))
    sides = models[pairs // len(names)] - models[pairs % len(names)]
    # Only differences count; this penalty fixes their sum at 0.
    penalty = np.ones((len(names), len(names)))

    def strengths(times: Floats) -> Floats:
        games = np.bincount(pair_of, times).astype(np.float64) + _PRIOR
        wins = np.bincount(pair_of, times * scores_of_lower) + _PRIOR / 2
        found: Floats = _MEAN + _SCALE * logistic_regression(sides, wins / games, games, penalty)
        return found

    found = strengths(np.ones(len(outcomes)))
    cluster_of = np.unique(range(len(outcomes)) if clusters is None else clusters, return_inverse=True)[1]
    count = int(cluster_of.max()) + 1
    drawn = bootstrap(lambda times: strengths(times[cluster_of]), count, seed, "ranking", resamples)
    lows, highs = np.percentile(drawn, [2.5, 97.5], axis=0)
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


def read_votes(path: str | Path) -> list[Outcome]:
    """The blind votes of a file, with the model on the left first; preferences without a ``vote`` are skipped.

    Raises `DataError` with file and line for any other row, and for a second vote in one round.
    """
    found: list[Outcome] = []
    lines: dict[str, int] = {}
    for number, row in json_rows(path):
        place = f"{path}, line {number}"
        if "vote" not in row and {"chosen", "rejected"} <= row.keys():
            continue
        found.append(_outcome(row, place))
        if (first := lines.setdefault(row["round"], number)) != number:
            raise DataError(f"{place}: the vote of this round is on line {first} already. Remove one of them.")
    if not found:
        raise DataError(f"{path} has no votes of an arena. Collect some with: sheepop eval arena MODEL MODEL")
    return found


def _outcome(row: dict[str, Any], place: str) -> Outcome:
    vote, models, name = (row.get(key) for key in ("vote", "models", "round"))
    if not isinstance(vote, str) or vote not in CHOICES:
        raise DataError(f'{place}: "vote" must be one of {", ".join(CHOICES)}, not {vote!r}.')
    if not isinstance(models, list) or len(models) != 2 or not all(isinstance(each, str) and each for each in models):
        raise DataError(f'{place}: "models" must be the names of two models, the left one first, not {models!r}.')
    if models[0] == models[1]:
        raise DataError(f"{place}: {models[0]!r} is compared with itself. Remove the line.")
    if not isinstance(name, str) or not name:
        raise DataError(f'{place}: "round" must be the name of the round, not {name!r}.')
    return Outcome(models[0], models[1], CHOICES[vote])
