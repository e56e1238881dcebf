"""Curves of several runs in one figure and in one chart, by step and by training time.

On held-out text they show bits per byte, which is comparable between tokenizers; on training text, the loss per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sheepop.report.charts import WHOLE, Chart, add_curve, empty_chart
from sheepop.report.figures import blank_figure, finish_axes
from sheepop.report.formatting import scored
from sheepop.report.palette import RUNS
from sheepop.report.series import FEWEST_TO_SMOOTH, Series, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Over = Literal["step", "seconds"]
_AXES = {"step": "Step", "seconds": "Training time (s)"}
_LEGEND_WIDTH, _LEGEND_KEY = 130, 10  # in characters: the width of the figure, and of the line beside a name
_LEGEND_LINE = 0.24  # inches
_SPLITS = ("validation", "train")
_KEYS = {"validation": "bits_per_byte", "train": "loss"}
_UNITS = {"validation": "Bits per byte", "train": "Nats per token"}
_DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"))


@dataclass(frozen=True)
class Curves:
    """A run's name and metrics; `is_sampled` if its validations read only a sample of the held-out text."""

    name: str
    metrics: Sequence[Mapping[str, Any]]
    is_sampled: bool = False


def comparison_figure(runs: Sequence[Curves]) -> Figure:
    """Four panels: held-out text on top, smoothed training loss below; by step (left) and training time (right)."""
    names = [run.name for run in runs if not all(_curve(run, split, "step").is_empty for split in _SPLITS)]
    columns = max(1, min(len(names), _LEGEND_WIDTH // (_LEGEND_KEY + max(map(len, names), default=0))))
    foot = _LEGEND_LINE * math.ceil(len(names) / columns)
    figure = blank_figure(11, 7.2 + foot, 2, 2, has_y_labels=True, foot=foot)
    lines: dict[int, Line2D] = {}  # by the index of the run, from the first panel that draws it
    for panels, split in zip(figure.subplots(2, 2), _SPLITS, strict=True):
        for axes, over in zip(panels, _AXES, strict=True):
            lines = {**_draw(axes, runs, split, over), **lines}
    _add_legend(figure, [(runs[place].name, lines[place]) for place in sorted(lines)], columns)
    return figure


def comparison_chart(runs: Sequence[Curves], split: str, *, over: Over) -> Chart:
    """Bits per byte of held-out text with scores as points, or the smoothed training loss, by step or training time."""
    chart = empty_chart(
        360,
        {"title": {"text": _AXES[over]}, "zeroline": False, "exponentformat": "none"},
        {"title": {"text": _UNITS[split], "standoff": 10}, "zeroline": False},
    )
    for place, run in enumerate(runs):
        dash, color = _DASHES[place // len(RUNS) % len(_DASHES)][1], RUNS[place % len(RUNS)]
        name = scored(run.name, is_sampled=run.is_sampled and split == "validation")
        add_curve(chart, _curve(run, split, over), name, color, dash=dash)
        if split == "validation":
            add_curve(chart, _score(run, over), f"{run.name}: {WHOLE[0].lower()}{WHOLE[1:]}", color, markers=True)
    return chart


def _draw(axes: Axes, runs: Sequence[Curves], split: str, over: str) -> dict[int, Line2D]:
    """Draws the runs that have values; returns their lines by the index of the run."""
    lines = {}
    for place, run in enumerate(runs):
        found = _curve(run, split, over)
        if found.is_empty:
            continue
        values = [math.nan if value is None else value for value in found.values]
        (lines[place],) = axes.plot(
            found.steps,
            values,
            color=RUNS[place % len(RUNS)],
            linestyle=_DASHES[place // len(RUNS) % len(_DASHES)][0],
            marker="o" if split == "validation" or len(values) < FEWEST_TO_SMOOTH else None,
            markersize=3,
            linewidth=1.5,
            label=run.name,
        )
        if split == "validation" and not (score := _score(run, over)).is_empty:
            scores = [math.nan if value is None else value for value in score.values]
            axes.plot(score.steps, scores, color=RUNS[place % len(RUNS)], marker="D", markersize=6, linestyle="")
    title = scored("Held-out text", is_sampled=any(run.is_sampled for run in runs))
    if any(not _score(run, "step").is_empty for run in runs):
        title += "; diamonds: all of it"
    title = title if split == "validation" else "Training loss, smoothed"
    finish_axes(axes, title, _AXES[over], has_legend=False)
    axes.set_ylabel(_UNITS[split], fontsize=9)
    return lines


def _add_legend(figure: Figure, named: Sequence[tuple[str, Line2D]], columns: int) -> None:
    if not named:
        return
    handles, labels = [line for _, line in named], [str(place) for place in range(len(named))]
    legend = figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    # Passed as labels, names that begin with an underscore would be dropped, and dollar signs would become formulas.
    for text, (name, _) in zip(legend.get_texts(), named, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _curve(run: Curves, split: str, over: str) -> Series:
    found = series(run.metrics, split, _KEYS[split], over=over)
    return found if split == "validation" else found.smoothed() or found


def _score(run: Curves, over: str) -> Series:
    """The score on all held-out text, at the step of its checkpoint or the time at which that was reached."""
    found = series(run.metrics, "score", _KEYS["validation"])
    if over == "step" or found.is_empty:
        return found
    steps, times = (series(run.metrics, "validation", _KEYS["validation"], over=name).steps for name in _AXES)
    reached = dict(zip(steps, times, strict=False)).get(found.steps[0])
    return Series([], []) if reached is None else Series([reached], found.values)
