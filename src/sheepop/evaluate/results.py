"""What an evaluation found: numbers, each with its definition and interval, and the items behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measure:
    """A number with what it means. `interval` holds the true value in 95 of 100 repetitions with other items.

    `count` is the number of items that it was computed from.
    """

    name: str
    value: float
    definition: str
    count: int
    interval: tuple[float, float] | None = None
    higher_is_better: bool = True


@dataclass(frozen=True)
class Item:
    """One thing that was asked: `values` by the name of the measure that they go into, and what a reader may look at.

    `id` is the same for every model, so that two models can be compared item by item.
    """

    id: str
    values: Mapping[str, float]
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A part of the result by something else: by source, by length, by position."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one model. `kind` is the command's word, `name` tells several of a kind apart.

    `settings` are all that the numbers depend on beside the model; `notes` say what a reader must know of them.
    """

    kind: str
    name: str
    measures: Sequence[Measure]
    items: Sequence[Item] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, name: str) -> Measure:
        """The measure of that name; raises `KeyError`."""
        return {measure.name: measure for measure in self.measures}[name]

    def to_dict(self) -> dict[str, Any]:
        """All but the items, as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "items"}
