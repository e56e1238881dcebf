"""The results of evaluations: measures with definitions and intervals, the items behind them, and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sheepop.core.errors import DataError
from sheepop.evaluate.statistics import (
    Difference,
    Reliability,
    mcnemar,
    paired_bootstrap,
    seeds_interval,
    share_interval,
)


@dataclass(frozen=True)
class Measure:
    """A number with its definition, its 95 percent interval, and the `count` of items that it was computed from."""

    name: str
    value: float
    definition: str
    count: int
    interval: tuple[float, float] | None = None
    higher_is_better: bool = True

    @classmethod
    def share(cls, name: str, flags: Sequence[float], definition: str, *, higher_is_better: bool = True) -> Measure:
        """The share of true flags (1 or 0) with Wilson's interval; 0 without interval if there are no flags."""
        right, count = int(sum(flags)), len(flags)
        interval = share_interval(right, count) if count else None
        return cls(name, right / max(1, count), definition, count, interval, higher_is_better)

    @classmethod
    def calibration_error(cls, found: Reliability, predicted: str) -> Measure:
        """The expected calibration error as a measure; `predicted` names what the probabilities are about."""
        definition = (
            f"Expected calibration error: how much the probability of {predicted} differs from how often it is right, "
            "on average over ten bins of probability."
        )
        count = sum(each.count for each in found.bins)
        return cls("calibration_error", found.ece, definition, count, higher_is_better=False)


@dataclass(frozen=True)
class Item:
    """One item of an evaluation: `values` by the name of their measure, and what a report shows of it.

    `id` is the same for every model, so that models can be compared item by item. A measure is the mean of its values,
    weighted by `weight`.
    """

    id: str
    values: Mapping[str, float]
    weight: float = 1.0
    shown: Mapping[str, Any] = field(default_factory=dict)


def mean_of(items: Iterable[Item], name: str) -> float | None:
    """The weighted mean of the values of that name, None if no item has one."""
    found = [(item.values[name], item.weight) for item in items if name in item.values]
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / total if total else None


@dataclass(frozen=True)
class Table:
    """A breakdown of the result, for example by source, length or position."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one model. `kind` is for example ``tasks``, `name` that of the task or data.

    `settings` are everything that the numbers depend on except the model; `notes` are warnings to the reader.
    """

    kind: str
    name: str
    measures: Sequence[Measure]
    items: Sequence[Item] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    reliability: Reliability | None = None

    def measure(self, name: str) -> Measure:
        """The measure of that name; raises `KeyError` if there is none."""
        return {measure.name: measure for measure in self.measures}[name]

    def to_dict(self) -> dict[str, Any]:
        """Everything except the items, as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "items"}


def scores_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The measures in the format of a model's provenance."""
    return [
        {
            "kind": evaluation.kind,
            "name": evaluation.name,
            "measure": measure.name,
            "value": measure.value,
            "interval": None if measure.interval is None else list(measure.interval),
            "count": measure.count,
            "definition": measure.definition,
            "settings": dict(evaluation.settings),
        }
        for measure in evaluation.measures
    ]


def over_seeds(found: Sequence[Evaluation]) -> Evaluation:
    """Merges evaluations that differ only in their seed: means, with Student's intervals over the seeds."""
    if len(found) == 1:
        return found[0]
    measures = []
    for measure in found[0].measures:
        values = [each.measure(measure.name).value for each in found]
        measures.append(
            replace(
                measure,
                value=sum(values) / len(values),
                interval=seeds_interval(values),
                count=sum(each.measure(measure.name).count for each in found),
                definition=f"{measure.definition} The mean of {len(found)} seeds; the interval is over seeds.",
            )
        )
    items = [replace(item, id=f"{item.id}, seed {number}") for number, each in enumerate(found) for item in each.items]
    names = [measure.name for measure in measures]
    rows = [[number, *(each.measure(name).value for name in names)] for number, each in enumerate(found)]
    tables = [Table("By seed", ("Seed", *names), rows), *found[0].tables]
    notes = [*found[0].notes, "The tables except the one by seed, and the picture, are those of the first seed."]
    return replace(found[0], measures=measures, items=items, tables=tables, notes=notes)


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
