"""Static figures of a run's metrics. Nothing here changes matplotlib's global state or opens a window."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheepop.core.files import storage_errors, write_atomic
from sheepop.report.formatting import scored
from sheepop.report.palette import TRAIN, VALIDATION
from sheepop.report.series import Series, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEWEST_WITHOUT_MARKERS = 30
# Ticks and their labels take most of the time of drawing.
_MOST_TICKS = 6

# Inches around panels, enough for the longest tick labels at the sizes used here. Fixed, because computing the margins
# from the panels takes longer than drawing the figure.
_TOP, _BELOW, _RIGHT, _BESIDE, _AXIS_LABEL = 0.4, 0.55, 0.25, 0.7, 0.2


def bare_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    # Where the home directory cannot be written, matplotlib says so and goes on with a temporary directory.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def blank_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, has_y_labels: bool = False, foot: float = 0.0
) -> Figure:
    """An empty figure, in inches, with margins for a grid of panels and `foot` inches below all of them."""
    figure = bare_figure(width, height)
    beside = _BESIDE + (_AXIS_LABEL if has_y_labels else 0.0)
    # matplotlib expects margins as shares of the figure, and gaps as shares of a panel.
    panel_width = (width - columns * (beside + _RIGHT)) / columns
    panel_height = (height - foot - rows * (_TOP + _BELOW)) / rows
    figure.subplots_adjust(
        left=beside / width,
        right=1 - _RIGHT / width,
        bottom=(foot + _BELOW) / height,
        top=1 - _TOP / height,
        wspace=(beside + _RIGHT) / panel_width,
        hspace=(_TOP + _BELOW) / panel_height,
    )
    return figure


def label_few_powers(axes: Axes) -> None:
    """Makes the x axis logarithmic, with labels such as 20k or 5G: of a narrow range matplotlib's own ones overlap."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())


def training_curves(metrics: Sequence[Mapping[str, Any]], *, is_sampled: bool = False) -> Figure:
    """Panels by step: loss (raw, smoothed, held out), learning rate, gradient norm, tokens per second, expert loads.

    The last panel is for networks with experts only. `is_sampled` marks validations that read a sample of the held-out
    text.
    """
    most, least = (series(metrics, "train", f"expert_load_{which}") for which in ("max", "min"))
    rows: list[Any] = [["loss", "learning_rate"], ["grad_norm", "speed"]]
    if not most.is_empty:
        rows.append(["loads", "loads"])
    figure = blank_figure(11, 3.5 * len(rows), len(rows), 2)
    axes = figure.subplot_mosaic(rows)
    _draw_smoothed(axes["loss"], series(metrics, "train", "loss"), "Training")
    held_out, name = series(metrics, "validation", "loss"), scored("Held out", is_sampled=is_sampled)
    _draw_line(axes["loss"], held_out, color=VALIDATION, label=name, marker="o", markersize=3.5)
    finish_axes(axes["loss"], "Loss (nats per token)")
    for key, title in (("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm before clipping")):
        _draw_line(axes[key], series(metrics, "train", key), color=TRAIN)
        finish_axes(axes[key], title)
    _draw_smoothed(axes["speed"], series(metrics, "train", "tokens_per_second"), "Measured")
    finish_axes(axes["speed"], "Tokens per second")
    if "loads" in axes:
        _draw_line(axes["loads"], most, color=VALIDATION, label="Most loaded")
        _draw_line(axes["loads"], least, color=TRAIN, label="Least loaded")
        finish_axes(axes["loads"], "Load of the experts, relative to even")
    for name, panel in axes.items():
        panel.locator_params(nbins=_MOST_TICKS)
        if name != "loss":
            panel.set_ylim(bottom=0)
    return figure


def range_test_figure(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float, lowest: float
) -> Figure:
    """A learning-rate range test: loss by rate, raw and smoothed, the suggested rate, and that of the lowest loss."""
    figure = blank_figure(8, 4.5, has_y_labels=True)
    axes = figure.subplots()
    axes.plot(rates, losses, color=TRAIN, alpha=0.35, linewidth=1.4, label="Loss")
    axes.plot(rates, smoothed, color=TRAIN, linewidth=1.8, label="Smoothed")
    axes.axvline(suggestion, color=VALIDATION, linewidth=1.4, label=f"Suggested: {suggestion:.2e}")
    axes.axvline(lowest, color="#777777", linestyle="--", linewidth=1.2, label=f"Lowest loss: {lowest:.2e}")
    axes.set_xscale("log")
    # The axis shows the fall of the loss; the rise after it may be cut off.
    low, high = min(smoothed), max(smoothed[: smoothed.index(min(smoothed)) + 1])
    margin = 0.15 * (high - low)
    axes.set_ylim(low - margin, high + 2 * margin)
    finish_axes(axes, "Learning-rate range test", "Learning rate")
    axes.set_ylabel("Loss (nats per token)", fontsize=9)
    return figure


def save_png(figure: Figure, path: str | Path) -> None:
    """Writes `figure` to `path` atomically, and makes its folder; the same figure gives the same bytes."""
    _save(figure, path, format="png", dpi=144, metadata={"Software": None})


def save_svg(figure: Figure, path: str | Path) -> None:
    """Like `save_png`, as a vector graphic."""
    from matplotlib import rc_context

    # Otherwise the ids of its elements are random.
    with rc_context({"svg.hashsalt": "sheepop"}):
        _save(figure, path, format="svg", metadata={"Date": None})


def _save(figure: Figure, path: str | Path, **options: Any) -> None:
    path, content = Path(path), BytesIO()
    figure.savefig(content, **options)
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def _draw_smoothed(axes: Axes, found: Series, label: str) -> None:
    """Draws a line and its moving average; the line is faint if there are enough points for an average."""
    average = found.smoothed()
    _draw_line(axes, found, color=TRAIN, alpha=0.35 if average else 1.0, label=label)
    if average is not None:
        _draw_line(axes, average, color=TRAIN, label=f"{label}, smoothed")


def _draw_line(axes: Axes, found: Series, **style: Any) -> None:
    if found.is_empty:
        return
    if len(found.steps) < _FEWEST_WITHOUT_MARKERS:
        style = {"marker": "o", "markersize": 3.5, **style}
    values = [math.nan if value is None else value for value in found.values]
    axes.plot(found.steps, values, linewidth=1.4, **style)


def finish_axes(axes: Axes, title: str, x_label: str = "Step", *, has_legend: bool = True) -> None:
    """Adds title, label and grid, and a legend if there are several lines and `has_legend`."""
    # Without a position, matplotlib lays out all ticks a second time to find one; it finds this one.
    axes.set_title(title, loc="left", fontsize=11, y=1.0)
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.text(0.5, 0.5, "No values yet", transform=axes.transAxes, ha="center", va="center", color="#777777")
    elif has_legend and len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
