"""Interactive charts of a run's metrics. Backgrounds are transparent, for light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sheepop.report.formatting import duration, scored
from sheepop.report.palette import GRID, NEUTRAL, REFERENCES, RUNS, SCORE, TRAIN, VALIDATION
from sheepop.report.series import Series, number, series

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Metrics = Sequence[Mapping[str, Any]]
WHOLE = "Best checkpoint, all held-out data"
_FEWEST_WITHOUT_MARKERS = 30


def loss_chart(metrics: Metrics, *, is_sampled: bool = False) -> Figure:
    """Training loss (raw, smoothed) and held-out loss by step; `is_sampled` if that was measured on a sample."""
    is_of_text = not any("margin" in row or "reward" in row for row in metrics)
    return _both_splits(metrics, "loss", "Nats per token" if is_of_text else "Loss", is_sampled=is_sampled)


def bits_per_byte_chart(
    metrics: Metrics, references: Mapping[str, float] | None = None, *, is_sampled: bool = False
) -> Figure:
    """Bits per byte of held-out text by step; `references` (name to bits per byte) are horizontal lines."""
    figure = _by_step("Bits per byte")
    found = series(metrics, "validation", "bits_per_byte")
    add_curve(figure, found, scored("This model", is_sampled=is_sampled), VALIDATION, markers=True)
    add_curve(figure, series(metrics, "score", "bits_per_byte"), WHOLE, SCORE, markers=True)
    if not found.is_empty:
        for place, (name, value) in enumerate((references or {}).items()):
            color = REFERENCES[place % len(REFERENCES)]
            level = Series([0, max(found.steps)], [number(value)] * 2)
            add_curve(figure, level, name, color, markers=False, dash="dash")
    return figure


def learning_rate_chart(metrics: Metrics) -> Figure:
    """Learning rate by step."""
    figure = _by_step(exponentformat="e", rangemode="tozero")
    add_curve(figure, series(metrics, "train", "learning_rate"), "Learning rate", TRAIN)
    return figure


def gradient_norm_chart(metrics: Metrics) -> Figure:
    """Norm of the gradient before clipping, by step."""
    figure = _by_step(rangemode="tozero")
    add_curve(figure, series(metrics, "train", "grad_norm"), "Gradient norm", TRAIN)
    return figure


def speed_chart(metrics: Metrics) -> Figure:
    """Training tokens per second by step, raw and smoothed."""
    figure = _by_step("Tokens per second", rangemode="tozero", exponentformat="SI")
    _add_smoothed(figure, series(metrics, "train", "tokens_per_second"), "Measured")
    return figure


def expert_load_chart(metrics: Metrics) -> Figure:
    """The largest and smallest load of an expert in any layer by step; 1 is an even load; empty without experts."""
    figure = _by_step("Load, relative to even", rangemode="tozero")
    add_curve(figure, series(metrics, "train", "expert_load_max"), "Most loaded", VALIDATION)
    add_curve(figure, series(metrics, "train", "expert_load_min"), "Least loaded", TRAIN)
    return figure


def reward_chart(metrics: Metrics, *, is_sampled: bool = False) -> Figure:
    """Reward by step, on training and held-out prompts; if they diverge, the policy overfits the reward."""
    return _both_splits(metrics, "reward", "Reward", is_sampled=is_sampled)


def order_chart(metrics: Metrics, *, is_sampled: bool = False) -> Figure:
    """The share of pairs in the right order by step, on both splits."""
    rows = [row for row in metrics if "margin" in row]
    return _both_splits(rows, "accuracy", "Share of pairs", is_sampled=is_sampled, range=[0, 1.02])


def divergence_chart(metrics: Metrics) -> Figure:
    """The divergence of the policy from the reference by step, in nats per answer."""
    figure = _by_step("Nats per answer", rangemode="tozero")
    add_curve(figure, series(metrics, "train", "divergence"), "Policy", TRAIN)
    return figure


def length_chart(metrics: Metrics, *, is_sampled: bool = False) -> Figure:
    """The length of answers in tokens by step, on both splits."""
    return _both_splits(metrics, "length", "Tokens", is_sampled=is_sampled, rangemode="tozero")


def _both_splits(metrics: Metrics, key: str, title: str, *, is_sampled: bool, **y_axis: Any) -> Figure:
    """The values of `key` in training and validation rows, and the score; `y_axis` are options of plotly."""
    figure = _by_step(title, **y_axis)
    _add_smoothed(figure, series(metrics, "train", key), "Training")
    name = scored("Held out", is_sampled=is_sampled)
    add_curve(figure, series(metrics, "validation", key), name, VALIDATION, markers=True)
    add_curve(figure, series(metrics, "score", key), WHOLE, SCORE, markers=True)
    return figure


def stage_times_chart(seconds: Mapping[str, float]) -> Figure:
    """The seconds of each stage as horizontal bars, the first stage on top."""
    from plotly.graph_objects import Bar

    known = {name: value for name, value in seconds.items() if number(value) is not None}
    figure = empty_chart(height=90 + 34 * len(known))
    if known:
        bar = Bar(
            x=list(known.values()),
            y=[_plain(name) for name in known],
            text=[duration(value) for value in known.values()],
            orientation="h",
            textposition="outside",
            cliponaxis=False,
            marker_color=TRAIN,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
        figure.add_trace(bar)
    figure.update_xaxes(title_text="Seconds", gridcolor=GRID, range=[0, 1.18 * max(known.values(), default=1) or 1])
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(bargap=0.4, hovermode="closest")
    return figure


def evaluation_charts(metrics: Metrics) -> dict[str, Figure]:
    """The evaluations during training by step: a chart for each metric, with a curve for each task."""
    keys = dict.fromkeys(key for row in metrics if row.get("split") == "evaluation" for key in row if "/" in key)
    charts: dict[str, Figure] = {}
    for key in keys:
        task, _, measure = key.rpartition("/")
        figure = charts.setdefault(measure, _by_step(measure.replace("_", " ")))
        add_curve(figure, series(metrics, "evaluation", key), task, RUNS[len(figure.data) % len(RUNS)], markers=True)
        figure.update_layout(showlegend=True)
    return charts


def course_chart(steps: Sequence[int], values: Sequence[float], measure: str) -> Figure:
    """A metric of a run's checkpoints by step."""
    figure = _by_step(measure)
    add_curve(figure, Series(steps, [number(value) for value in values]), measure, SCORE, markers=True)
    return figure


def reliability_chart(confidences: Sequence[float | None], accuracies: Sequence[float | None]) -> Figure:
    """The accuracy of answers by the confidence of the model, as bin means, and the diagonal of perfect calibration."""
    figure = empty_chart(height=340)
    figure.update_xaxes(title_text="Probability that the model gave", gridcolor=GRID, zeroline=False, range=[0, 1])
    figure.update_yaxes(
        title={"text": "Share that was right", "standoff": 10}, gridcolor=GRID, range=[0, 1.02], automargin=True
    )
    found = [pair for pair in zip(confidences, accuracies, strict=True) if None not in pair]
    add_curve(figure, Series([0, 1], [0.0, 1.0]), "Perfectly calibrated", NEUTRAL, markers=False, dash="dash")
    add_curve(figure, Series([x or 0.0 for x, _ in found], [y for _, y in found]), "This model", SCORE, markers=True)
    return figure


def _by_step(title: str = "", **y_axis: Any) -> Figure:
    figure = empty_chart(height=320)
    figure.update_xaxes(title_text="Step", gridcolor=GRID, zeroline=False, rangemode="tozero", exponentformat="none")
    y_axis = {"title": {"text": title, "standoff": 10}, "gridcolor": GRID, "zeroline": False, **y_axis}
    figure.update_yaxes(automargin=True, **y_axis)
    return figure


def empty_chart(height: int) -> Figure:
    """A chart without data, in the style of all charts."""
    from plotly.graph_objects import Figure

    # Plotly's own template would paint a light background.
    return Figure(
        layout={
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


def _add_smoothed(figure: Figure, found: Series, name: str) -> None:
    """Adds a line and its moving average; the line is faint if there are enough points for an average."""
    average = found.smoothed()
    add_curve(figure, found, name, TRAIN, opacity=0.35 if average else 1.0)
    if average is not None:
        add_curve(figure, average, f"{name}, smoothed", TRAIN, markers=False)


def add_curve(
    figure: Figure,
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
    from plotly.graph_objects import Scatter

    if markers is None:
        markers = len(found.steps) < _FEWEST_WITHOUT_MARKERS
    line = Scatter(
        x=found.steps,
        y=found.values,
        name=_plain(name),
        mode="lines+markers" if markers else "lines",
        line={"color": color, "width": 1.8, "dash": dash},
        marker={"color": color, "size": 6},
        opacity=opacity,
        showlegend=True,
    )
    figure.add_trace(line)
    figure.update_layout(showlegend=len(figure.data) > 1)


def _plain(text: str) -> str:
    """Escapes text for plotly, which interprets tags and entities in names."""
    return html.escape(str(text), quote=False)
