"""Evaluation of a judge's verdicts: win rates, also at equal length, a ranking, and measures of the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sheepop.core.errors import DataError
from sheepop.evaluate.judge import Row, Verdicts
from sheepop.evaluate.ranking import Outcome, rank
from sheepop.evaluate.results import Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import Floats, bootstrap, logistic_regression

UNREADABLE_SHARE = 0.05
"""A larger share of unreadable pairs is noted in the report."""
RIDGE = 0.01
_RESAMPLES = 500
_RATES = {
    "win_rate": "Share of pairs in which the judge finds this model's answer better in both orders; ties, and pairs "
    "whose orders disagree, count half.",
    "length_controlled_win_rate": "The same, predicted for answers of equal length by a logistic regression on models "
    f"and difference of lengths with ridge {RIDGE:g} (after Dubois et al. 2024).",
}
_HALF, _UNREADABLE = "A tie in one order alone", "Unreadable"
_ENDS: dict[tuple[str | None, str | None], str] = {
    ("A", "B"): "First better",
    ("B", "A"): "Second better",
    ("C", "C"): "Tie",
    ("A", "A"): "Whichever is shown first",
    ("B", "B"): "Whichever is shown second",
}


def judged(verdicts: Verdicts, name: str = "judge") -> list[Evaluation]:
    """One evaluation of each model, in order; intervals come from a bootstrap over prompts.

    Raises `DataError` if a model has no readable verdict.
    """
    read = [row for row in verdicts.rows if row.scores is not None]
    for model in verdicts.models:
        if not any(model in row.comparison.names for row in read):
            reply = next(row.said[0] for row in verdicts.rows if model in row.comparison.names)
            raise DataError(
                f"The judge gave no verdict on {model} that can be read, but: {reply[:200]!r}. Use another judge."
            )
    outcomes = [Outcome(*row.comparison.names, row.score) for row in read]
    ranking = rank(outcomes, clusters=[row.comparison.prompt.id for row in read])
    table = Table(
        "Ranking (Bradley-Terry)",
        ("Model", "Strength", "From", "To", "Pairs", "Win rate"),
        [[each.name, each.strength, *each.interval, each.games, each.win_rate] for each in ranking],
    )
    rates, strengths = _win_rates(verdicts.models, read), {each.name: each for each in ranking}
    settings = {"models": list(verdicts.models), "pairs": len(verdicts.rows), "ridge": RIDGE}
    found = []
    for model in verdicts.models:
        rows = [row for row in verdicts.rows if model in row.comparison.names]
        strength = strengths[model]
        measures = [
            *rates[model],
            Measure(
                "strength",
                strength.strength,
                "On the scale of Elo, with mean 1000: 400 more are 10 times the odds (Bradley and Terry 1952).",
                strength.games,
                strength.interval,
            ),
            *_trust(rows),
        ]
        unreadable = measures[-1]
        notes = [
            f"{unreadable.value:.0%} of the pairs had no verdict that could be read. They are left out of the other "
            "numbers, which may favour either side. Look at the judge's replies, or use another judge."
        ] * (unreadable.value > UNREADABLE_SHARE)
        found.append(Evaluation("judge", name, measures, _items(model, rows), [table, _by_pair(rows)], notes, settings))
    return found


def _win_rates(models: Sequence[str], rows: Sequence[Row]) -> dict[str, list[Measure]]:
    """The win rates of all models, as observed and predicted for answers of equal length.

    The prediction is a logistic regression of the score on the models and on tanh of the difference in length divided
    by its root mean square (Dubois et al. 2024, without their terms for the difficulty of a prompt).
    """
    pairs = [row.comparison for row in rows]
    sides = np.array([[float(m == pair.names[0]) - float(m == pair.names[1]) for m in models] for pair in pairs])
    scores = np.array([row.score for row in rows])
    differences = np.array([float(len(pair.answers[0]) - len(pair.answers[1])) for pair in pairs])
    # From -1 to 1; swapping two answers changes only the sign.
    longer = np.tanh(differences / (np.sqrt(np.mean(differences**2)) or 1.0))
    prompts = np.unique([pair.prompt.id for pair in pairs], return_inverse=True)[1]
    found = _rates(sides, longer, scores, np.ones(len(rows)))
    count = int(prompts.max()) + 1
    drawn = bootstrap(lambda times: _rates(sides, longer, scores, times[prompts]), count, 0, "judge", _RESAMPLES)
    lows, highs = np.nanpercentile(drawn, [2.5, 97.5], axis=0)
    games = np.abs(sides).sum(0).astype(int).tolist()
    return {
        model: [
            Measure(
                name,
                float(found[kind, place]),
                definition,
                games[place],
                (float(lows[kind, place]), float(highs[kind, place])),
            )
            for kind, (name, definition) in enumerate(_RATES.items())
        ]
        for place, model in enumerate(models)
    }


def _rates(sides: Floats, longer: Floats, scores: Floats, weights: Floats) -> Floats:
    """Win rates as observed and at equal length (2, models).

    `sides` (pairs, models) is 1 for the first model of a pair and -1 for the second; `longer`, `scores` and `weights`
    have shape (pairs,).
    """
    features = np.column_stack([sides, longer])
    strengths = logistic_regression(features, scores, weights, RIDGE * np.eye(features.shape[1]))[:-1]
    even = 1 / (1 + np.exp(-sides @ strengths))
    won = np.stack([(weights * (each - 0.5)) @ sides for each in (scores, even)])
    with np.errstate(invalid="ignore"):  # a bootstrap sample may lack a model
        found: Floats = 0.5 + won / (weights @ np.abs(sides))
    return found


def _trust(rows: Sequence[Row]) -> list[Measure]:
    """Measures of the judge on these pairs; the last one is the unreadable rate."""
    read = [row for row in rows if row.scores is not None]
    agreed = [row.scores is not None and row.scores[0] == row.scores[1] for row in read]
    ties = [row.score == 0.5 for row in read]
    return [
        Measure.share("agreement", agreed, "Share of pairs with the same verdict in both orders."),
        Measure.share(
            "position_bias",
            [row.follows_position for row in read],
            "Share of pairs in which the judge prefers a position: the answer that is shown first in both orders, or "
            "the one that is shown second.",
            higher_is_better=False,
        ),
        Measure.share(
            "tie_rate", ties, "Share of pairs that are ties, or whose orders disagree.", higher_is_better=False
        ),
        Measure.share(
            "unreadable_rate",
            [row.scores is None for row in rows],
            "Share of pairs with a verdict that cannot be read after two requests.",
            higher_is_better=False,
        ),
    ]


def _items(model: str, rows: Sequence[Row]) -> list[Item]:
    """One item for each prompt, with all of the model's pairs on it, so that all models have the same items."""
    by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.comparison.prompt.id, []).append(row)
    found = []
    for name, pairs in by_prompt.items():
        read = [row for row in pairs if row.scores is not None]
        won = [row.score if row.comparison.names[0] == model else 1 - row.score for row in read]
        judged_pairs = [{**row.kept(), "answers": list(row.comparison.answers)} for row in pairs]
        values = {"win_rate": sum(won) / len(won)} if won else {}
        shown = {"prompt": pairs[0].comparison.prompt.text, "pairs": judged_pairs}
        found.append(Item(name, values, float(len(won) or 1), shown))
    return found


def _by_pair(rows: Sequence[Row]) -> Table:
    """The number of pairs by outcome, for every two models."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        unlike = _UNREADABLE if row.scores is None else _HALF
        found.setdefault(row.comparison.names, Counter())[_ENDS.get(row.verdicts, unlike)] += 1
    header = (*_ENDS.values(), _HALF, _UNREADABLE)
    lines = [[*names, *(counts[end] for end in header)] for names, counts in found.items()]
    return Table("By pair of models", ("First", "Second", *header), lines)
