"""Comparison of two models on the same items, with significance tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sheepop.core.errors import DataError
from sheepop.evaluate.results import Evaluation, Item
from sheepop.evaluate.statistics import Difference, mcnemar, paired_bootstrap


@dataclass(frozen=True)
class Compared:
    """The difference between two models in one measure: the first minus the second.

    `test` names the test behind `difference.p`, the probability of a difference as large between equal models.
    """

    kind: str
    name: str
    measure: str
    first: str
    second: str
    difference: Difference
    test: str
    higher_is_better: bool

    @property
    def better(self) -> str | None:
        """The better model, or None if the difference is not significant at p < 0.05."""
        if self.difference.p >= 0.05:
            return None
        return self.first if (self.difference.value > 0) == self.higher_is_better else self.second


def compare(first: str, ours: Sequence[Evaluation], second: str, theirs: Sequence[Evaluation]) -> list[Compared]:
    """Compares all measures that both models have, item by item.

    Measures with values 0 and 1 are tested with McNemar's exact test, others with a paired bootstrap. Raises
    `DataError` for two evaluations of one name whose items differ.
    """
    others = {(evaluation.kind, evaluation.name): evaluation for evaluation in theirs}
    return [
        found
        for evaluation in ours
        if (other := others.get((evaluation.kind, evaluation.name))) is not None
        for found in _compared(first, evaluation, second, other)
    ]


def _compared(first: str, ours: Evaluation, second: str, theirs: Evaluation) -> Iterator[Compared]:
    mine, yours = ({item.id: item for item in evaluation.items} for evaluation in (ours, theirs))
    if mine.keys() != yours.keys():
        raise DataError(
            f"{first} and {second} have different items in {ours.name}: {len(mine.keys() ^ yours.keys())} belong to "
            "only one of them. Evaluate both with the same settings."
        )
    for measure in ours.measures:
        names = [item for item in mine if measure.name in mine[item].values and measure.name in yours[item].values]
        if not names:
            continue
        difference, test = _difference([mine[name] for name in names], [yours[name] for name in names], measure.name)
        yield Compared(ours.kind, ours.name, measure.name, first, second, difference, test, measure.higher_is_better)


def _difference(ours: Sequence[Item], theirs: Sequence[Item], measure: str) -> tuple[Difference, str]:
    a, b = ([item.values[measure] for item in items] for items in (ours, theirs))
    weights = [item.weight for item in ours]
    if set(a) | set(b) <= {0.0, 1.0} and set(weights) == {1.0}:
        return mcnemar([value == 1.0 for value in a], [value == 1.0 for value in b]), "McNemar, exact"
    return paired_bootstrap(a, b, weights), "paired bootstrap"
