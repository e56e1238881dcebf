"""A metric by step, taken from the rows of ``metrics.jsonl``, and smoothed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPANS = 40
FEWEST_TO_SMOOTH = 10
_LARGEST_DRAWN = 1e100  # differences and margins of larger values overflow in the plotting libraries


@dataclass(frozen=True)
class Series:
    """Values by optimizer step, or by another quantity or day on the x axis; None if a row has no number."""

    steps: Sequence[Any]
    values: list[float | None]

    @property
    def is_empty(self) -> bool:
        """Whether there are no numbers."""
        return all(value is None for value in self.values)

    def smoothed(self) -> Series | None:
        """A moving average over about a 40th of the points, or None if there are too few points."""
        if sum(value is not None for value in self.values) < FEWEST_TO_SMOOTH:
            return None
        return Series(self.steps, smooth(self.values, max(3.0, len(self.values) / _SPANS)))


def number(value: Any) -> float | None:
    """`value` as a finite float, or None if it is anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def series(metrics: Sequence[Mapping[str, Any]], split: str, key: str, *, over: str = "step") -> Series:
    """The values of `key` in the rows of `split` that have `key` and `over`; None if too large to draw."""
    rows = [row for row in metrics if row.get("split") == split and key in row and _drawn(row.get(over)) is not None]
    places = [row[over] if over != "step" else int(row[over]) for row in rows]
    return Series(places, [_drawn(row[key]) for row in rows])


def smooth(values: Sequence[float | None], span: float) -> list[float | None]:
    """Exponential moving average with decay 1 - 2 / (span + 1), without a bias to zero at the start.

    Value i is the mean of the values j <= i with weights decay^(i - j), where i and j count numbers only (the bias
    correction of Kingma and Ba 2015, section 3). None stays None and has no weight. `span` is at least 1.
    """
    if span < 1:
        raise ValueError(f"span must be at least 1, got {span}")
    decay = 1 - 2 / (span + 1)
    total = weight = 0.0
    result: list[float | None] = []
    for value in values:
        if value is None:
            result.append(None)
            continue
        total, weight = decay * total + value, decay * weight + 1
        result.append(total / weight)
    return result


def _drawn(value: Any) -> float | None:
    found = number(value)
    return None if found is None or abs(found) > _LARGEST_DRAWN else found
