"""Importing this spares toy runs the drawing of their curves, a tenth to a third of their time.

Every run still writes a picture, with the pixels of the first figure of that size in the process; and it makes its
figure, unless one was made of rows of the same form. What figures show is tested in ``tests/report``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sheepop.jobs.run import report
from sheepop.report import save_png, training_curves

_DRAWN: dict[tuple[float, ...], bytes] = {}
_MADE: dict[object, Figure] = {}


def save_once(figure: Figure, path: Path) -> None:
    """As `save_png`, but draws only the first figure of each size."""
    size = tuple(figure.get_size_inches())
    if size in _DRAWN:
        figure.savefig = lambda file, **options: file.write(_DRAWN[size])  # type: ignore[method-assign]
    save_png(figure, path)
    _DRAWN.setdefault(size, path.read_bytes())


def curves_once(metrics: Sequence[Mapping[str, Any]], **options: bool) -> Figure:
    """As `training_curves`, but makes only the first figure of rows with such names and values: one, two or more."""
    counts = Counter(
        (str(row.get("split")), name, type(value), isinstance(value, float) and math.isfinite(value))
        for row in metrics
        for name, value in row.items()
    )
    form = frozenset((*key, min(count, 3)) for key, count in counts.items()), *options.items()
    if form not in _MADE:
        _MADE[form] = training_curves(metrics, **options)
    return _MADE[form]


report.save_png = save_once
report.training_curves = curves_once
