"""Pictures of analyses: heat maps, and lines over the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from sheepop.interpret.pictures import Picture, name_ticks, panel, plain
from sheepop.report.palette import TRAIN, VALIDATION

_COLOURS = (VALIDATION, TRAIN, "#009e73", "#848b94")
_ROW, _COLUMN = 0.3, 0.34  # inches
_WIDE_ENOUGH = 0.45  # inches of a cell with its number


def heat_map(
    name: str,
    title: str,
    numbers: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    meaning: str,
    *,
    decades: int | None = None,
) -> Picture:
    """A map of `numbers` (rows, columns), from 0 up, or on a logarithmic scale of some `decades` up to the largest.

    A number that is not finite is a blank; on a logarithmic scale, 0 is too.
    """
    from matplotlib.colors import LogNorm, Normalize

    size = min(20, max(5, _COLUMN * len(columns) + 2.5)), min(20, max(2.6, _ROW * len(rows) + 1.4))
    figure, axes = panel(*size, title)
    most = float(numbers.nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
    scale = Normalize(0, most) if decades is None else LogNorm(most / 10**decades, most, clip=True)
    drawn = numbers if decades is None else numbers.where(numbers > 0, math.nan)
    image = axes.imshow(drawn.numpy(), aspect="auto", interpolation="nearest", cmap="Blues", norm=scale)
    name_ticks(axes, "x", columns)
    name_ticks(axes, "y", rows)
    if size[0] / len(columns) >= _WIDE_ENOUGH:
        for row, values in enumerate(numbers.tolist()):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    colour = "white" if value and float(scale(value)) > 0.6 else "black"
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label=meaning)
    return Picture(name, figure, {})


def lines_by_layer(name: str, title: str, lines: Mapping[str, Sequence[float]], meaning: str) -> Picture:
    """Lines of a number of each block, on a logarithmic axis."""
    figure, axes = panel(7, 4, title)
    for (label, values), colour in zip(lines.items(), _COLOURS, strict=False):
        axes.plot(values, marker="o", markersize=3.5, linewidth=1.6, color=colour, label=label)
    axes.set(xlabel="Block", ylabel=meaning, yscale="log")
    count = max(map(len, lines.values()))
    axes.set_xticks(range(0, count, math.ceil(count / 12)))
    axes.legend(frameon=False, fontsize=8)
    plain(axes)
    return Picture(name, figure, {})
