"""Blind votes of people on pairs of answers, and the ranking of models that follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.evaluate.questions import json_rows
from sheepop.evaluate.ranking import Outcome, Rated, rank

CHOICES = {"left": 1.0, "right": 0.0, "tie": 0.5, "neither": 0.5}
"""The possible votes, and their scores for the model on the left; "neither" means that both answers are bad."""


def standings(path: str | Path) -> list[Rated]:
    """The models of a file of votes, strongest first; raises `DataError` as `read_votes` and `rank` do."""
    return rank(read_votes(path))


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
