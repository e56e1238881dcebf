"""Interactive charts of a run's metrics. Backgrounds are transparent, for light and dark pages.

A chart is plain data in the form that Plotly draws (https://plotly.com/javascript/reference/), because Plotly's Python
objects take longer to make than all else on a page. The tests have Plotly check it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sheepop.report.formatting import duration, scored
from sheepop.report.palette import GRID, NEUTRAL, REFERENCES, RUNS, SCORE, TRAIN, VALIDATION
from sheepop.report.series import Series, number, series

Metrics = Sequence[Mapping[str, Any]]
WHOLE = "Best checkpoint, all held-out data"
_FEWEST_WITHOUT_MARKERS = 30


@dataclass(frozen=True)
class Chart:
    """A chart: its layout, and its traces, such as curves; empty without traces."""

    layout: dict[str, Any]
    data: list[dict[str, Any]] = field(default_factory=list)


def loss_chart(metrics: Metrics, *, is_sampled: bool = False) -> Chart:
    """Training loss (raw, smoothed) and held-out loss by step; `is_sampled` if that was measured on a sample."""
    is_of_text = not any("margin" in row or "reward" in row for row in metrics)
    return _both_splits(metrics, "loss", "Nats per token" if is_of_text else "Loss", is_sampled=is_sampled)


def bits_per_byte_chart(
    metrics: Metrics, references: Mapping[str, float] | None = None, *, is_sampled: bool = False
) -> Chart:
    """Bits per byte of held-out text by step; `references` (name to bits per byte) are horizontal lines."""
    chart = _by_step("Bits per byte")
    found = series(metrics, "validation", "bits_per_byte")
    add_curve(chart, found, scored("This model", is_sampled=is_sampled), VALIDATION, markers=True)
    add_curve(chart, series(metrics, "score", "bits_per_byte"), WHOLE, SCORE, markers=True)
    if not found.is_empty:
        for place, (name, value) in enumerate((references or {}).items()):
            color = REFERENCES[place % len(REFERENCES)]
            level = Series([0, max(found.steps)], [number(value)] * 2)
            add_curve(chart, level, name, color, markers=False, dash="dash")
    return chart


def learning_rate_chart(metrics: Metrics) -> Chart:
    """Learning rate by step."""
    chart = _by_step(exponentformat="e", rangemode="tozero")
    add_curve(chart, series(metrics, "train", "learning_rate"), "Learning rate", TRAIN)
    return chart


def gradient_norm_chart(metrics: Metrics) -> Chart:
    """Norm of the gradient before clipping, by step."""
    chart = _by_step(rangemode="tozero")
    add_curve(chart, series(metrics, "train", "grad_norm"), "Gradient norm", TRAIN)
    return chart


def speed_chart(metrics: Metrics) -> Chart:
    """Training tokens per second by step, raw and smoothed."""
    chart = _by_step("Tokens per second", rangemode="tozero", exponentformat="SI")
    _add_smoothed(chart, series(metrics, "train", "tokens_per_second"), "Measured")
    return chart


def expert_load_chart(metrics: Metrics) -> Chart:
    """The largest and smallest load of an expert in any layer by step; 1 is an even load; empty without experts."""
    chart = _by_step("Load, relative to even", rangemode="tozero")
    add_curve(chart, series(metrics, "train", "expert_load_max"), "Most loaded", VALIDATION)
    add_curve(chart, series(metrics, "train", "expert_load_min"), "Least loaded", TRAIN)
    return chart


def stability_chart(metrics: Metrics) -> Chart:
    """The sharpness as a share of its limit by step, with the limit as a line; empty if it was not measured."""
    chart, found = _by_step("Share of the limit", rangemode="tozero"), series(metrics, "analysis", "sharpness_share")
    add_curve(chart, found, "Sharpness", TRAIN, markers=True)
    if not found.is_empty:
        ends = [min(found.steps), max(found.steps)]
        add_curve(chart, Series(ends, [1.0, 1.0]), "Limit of the optimizer", VALIDATION, markers=False, dash="dash")
    return chart


def reward_chart(metrics: Metrics, *, is_sampled: bool = False) -> Chart:
    """Reward by step, on training and held-out prompts; if they diverge, the policy overfits the reward."""
    return _both_splits(metrics, "reward", "Reward", is_sampled=is_sampled)


def order_chart(metrics: Metrics, *, is_sampled: bool = False) -> Chart:
    """The share of pairs in the right order by step, on both splits."""
    rows = [row for row in metrics if "margin" in row]
    return _both_splits(rows, "accuracy", "Share of pairs", is_sampled=is_sampled, range=[0, 1.02])


def divergence_chart(metrics: Metrics) -> Chart:
    """The divergence of the policy from the reference by step, in nats per answer."""
    chart = _by_step("Nats per answer", rangemode="tozero")
    add_curve(chart, series(metrics, "train", "divergence"), "Policy", TRAIN)
    return chart


def teacher_chart(metrics: Metrics, *, is_sampled: bool = False) -> Chart:
    """The divergence of the model from its teacher by step, in nats per token, on both splits."""
    return _both_splits(metrics, "divergence_from_teacher", "Nats per token", is_sampled=is_sampled, rangemode="tozero")


def length_chart(metrics: Metrics, *, is_sampled: bool = False) -> Chart:
    """The length of answers in tokens by step, on both splits."""
    return _both_splits(metrics, "length", "Tokens", is_sampled=is_sampled, rangemode="tozero")


def _both_splits(metrics: Metrics, key: str, title: str, *, is_sampled: bool, **y_axis: Any) -> Chart:
    """The values of `key` in training and validation rows, and the score; `y_axis` are options of plotly."""
    chart = _by_step(title, **y_axis)
    _add_smoothed(chart, series(metrics, "train", key), "Training")
    name = scored("Held out", is_sampled=is_sampled)
    add_curve(chart, series(metrics, "validation", key), name, VALIDATION, markers=True)
    add_curve(chart, series(metrics, "score", key), WHOLE, SCORE, markers=True)
    return chart


def stage_times_chart(seconds: Mapping[str, float]) -> Chart:
    """The seconds of each stage as horizontal bars, the first stage on top."""
    known = {name: value for name, value in seconds.items() if number(value) is not None}
    x_axis = {"title": {"text": "Seconds"}, "range": [0, 1.18 * max(known.values(), default=1) or 1]}
    chart = empty_chart(90 + 34 * len(known), x_axis, {"autorange": "reversed", "automargin": True})
    chart.layout.update(bargap=0.4, hovermode="closest")
    if known:
        bar = {
            "type": "bar",
            "x": list(known.values()),
            "y": [_plain(name) for name in known],
            "text": [duration(value) for value in known.values()],
            "orientation": "h",
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": TRAIN},
            "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
        chart.data.append(bar)
    return chart


def evaluation_charts(metrics: Metrics) -> dict[str, Chart]:
    """The evaluations during training by step: a chart for each metric, with a curve for each task."""
    keys = dict.fromkeys(key for row in metrics if row.get("split") == "evaluation" for key in row if "/" in key)
    charts: dict[str, Chart] = {}
    for key in keys:
        task, _, measure = key.rpartition("/")
        chart = charts.setdefault(measure, _by_step(measure.replace("_", " ")))
        add_curve(chart, series(metrics, "evaluation", key), task, RUNS[len(chart.data) % len(RUNS)], markers=True)
        chart.layout["showlegend"] = True
    return charts


def course_chart(steps: Sequence[int], values: Sequence[float], measure: str) -> Chart:
    """A metric of a run's checkpoints by step."""
    chart = _by_step(measure)
    add_curve(chart, Series(steps, [number(value) for value in values]), measure, SCORE, markers=True)
    return chart


def reliability_chart(confidences: Sequence[float | None], accuracies: Sequence[float | None]) -> Chart:
    """The accuracy of answers by the confidence of the model, as bin means, and the diagonal of perfect calibration."""
    chart = empty_chart(
        340,
        {"title": {"text": "Probability that the model gave"}, "zeroline": False, "range": [0, 1]},
        {"title": {"text": "Share that was right", "standoff": 10}, "range": [0, 1.02], "automargin": True},
    )
    found = [pair for pair in zip(confidences, accuracies, strict=True) if None not in pair]
    add_curve(chart, Series([0, 1], [0.0, 1.0]), "Perfectly calibrated", NEUTRAL, markers=False, dash="dash")
    add_curve(chart, Series([x or 0.0 for x, _ in found], [y for _, y in found]), "This model", SCORE, markers=True)
    return chart


def shares_chart(curves: Mapping[str, Sequence[tuple[str, float, float, float]]]) -> Chart:
    """Shares by day, each a point (day, share, low, high) with its interval."""
    chart = empty_chart(
        340, {"type": "date"}, {"rangemode": "tozero", "tickformat": ".0%", "automargin": True, "zeroline": False}
    )
    for place, (name, points) in enumerate(curves.items()):
        days, values, lows, highs = zip(*points, strict=True)
        add_curve(chart, Series(days, list(values)), name, RUNS[place % len(RUNS)], markers=True)
        chart.data[-1]["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [high - value for high, value in zip(highs, values, strict=True)],
            "arrayminus": [value - low for low, value in zip(lows, values, strict=True)],
            "thickness": 1,
            "width": 2,
        }
    return chart


def _by_step(title: str = "", **y_axis: Any) -> Chart:
    x_axis = {"title": {"text": "Step"}, "zeroline": False, "rangemode": "tozero", "exponentformat": "none"}
    y_axis = {"title": {"text": title, "standoff": 10}, "zeroline": False, "automargin": True, **y_axis}
    return empty_chart(320, x_axis, y_axis)


def empty_chart(height: int, x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> Chart:
    """A chart without traces, in the style of all charts."""
    return Chart(
        {
            "xaxis": {"gridcolor": GRID, **x_axis},
            "yaxis": {"gridcolor": GRID, **y_axis},
            # Plotly's own template would paint a light background.
            "template": {},
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 44, "b": 44},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": NEUTRAL},
            "hovermode": "x unified",
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": NEUTRAL, "activecolor": TRAIN},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        }
    )


def _add_smoothed(chart: Chart, found: Series, name: str) -> None:
    """Adds a line and its moving average; the line is faint if there are enough points for an average."""
    average = found.smoothed()
    add_curve(chart, found, name, TRAIN, opacity=0.35 if average else 1.0)
    if average is not None:
        add_curve(chart, average, f"{name}, smoothed", TRAIN, markers=False)


def add_curve(
    chart: Chart,
    found: Series,
    name: str,
    color: str,
    *,
    markers: bool | None = None,
    opacity: float = 1.0,
    dash: str = "solid",
) -> None:
    """Adds `found` unless it is empty; if there are few points, each gets a marker, so that one alone is visible."""
    if found.is_empty:
        return
    if markers is None:
        markers = len(found.steps) < _FEWEST_WITHOUT_MARKERS
    line = {
        "type": "scatter",
        "x": list(found.steps),
        "y": found.values,
        "name": _plain(name),
        "mode": "lines+markers" if markers else "lines",
        "line": {"color": color, "width": 1.8, "dash": dash},
        "marker": {"color": color, "size": 6},
        "opacity": opacity,
        "showlegend": True,
    }
    chart.data.append(line)
    chart.layout["showlegend"] = len(chart.data) > 1


def _plain(text: str) -> str:
    """Escapes text for plotly, which interprets tags and entities in names."""
    return html.escape(str(text), quote=False)
