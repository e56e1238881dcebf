from __future__ import annotations

from typing import Any

import pytest

from sheepop.report import charts, smooth

from .conftest import of_plotly

bits_per_byte_chart, divergence_chart, expert_load_chart, gradient_norm_chart, learning_rate_chart = map(
    of_plotly,
    (
        charts.bits_per_byte_chart,
        charts.divergence_chart,
        charts.expert_load_chart,
        charts.gradient_norm_chart,
        charts.learning_rate_chart,
    ),
)
loss_chart, order_chart, reward_chart, speed_chart, stage_times_chart = map(
    of_plotly,
    (charts.loss_chart, charts.order_chart, charts.reward_chart, charts.speed_chart, charts.stage_times_chart),
)

Rows = list[dict[str, Any]]


def column(metrics: Rows, split: str, key: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    rows = [row for row in metrics if row["split"] == split]
    return tuple(row["step"] for row in rows), tuple(row[key] for row in rows)


def test_loss_holds_the_metrics_of_both_splits(metrics: Rows) -> None:
    raw, average, held_out = loss_chart(metrics).data
    assert (raw.x, raw.y) == column(metrics, "train", "loss")
    assert None in raw.y
    assert list(average.y) == smooth(raw.y, 3.0)
    assert (held_out.x, held_out.y) == column(metrics, "validation", "loss")
    assert [trace.name for trace in (raw, average, held_out)] == ["Training", "Training, smoothed", "Held out"]


@pytest.mark.parametrize(
    ("chart", "key"),
    [
        (learning_rate_chart, "learning_rate"),
        (gradient_norm_chart, "grad_norm"),
        (speed_chart, "tokens_per_second"),
    ],
)
def test_other_charts_hold_their_metric(chart: Any, key: str, metrics: Rows) -> None:
    trace = chart(metrics).data[0]
    assert (trace.x, trace.y) == column(metrics, "train", key)


def test_expert_loads_are_drawn_where_there_are_experts(metrics: Rows) -> None:
    assert not expert_load_chart(metrics).data
    rows = [
        {"step": step, "split": "train", "expert_load_max": 1.5 + step, "expert_load_min": 0.5} for step in (1, 2, 3)
    ]
    most, least = expert_load_chart(rows).data
    assert (most.name, most.x, most.y) == ("Most loaded", (1, 2, 3), (2.5, 3.5, 4.5))
    assert (least.name, least.x, least.y) == ("Least loaded", (1, 2, 3), (0.5, 0.5, 0.5))


def test_rewards_are_drawn_for_both_splits(metrics: Rows) -> None:
    assert not reward_chart(metrics).data and not divergence_chart(metrics).data
    assert not order_chart(metrics).data, "accuracy of tokens is none of pairs"
    rows = [
        {"step": step, "split": split, "reward": step / 2, "accuracy": 0.5, "margin": 1.0, "divergence": 0.25 * step}
        for step in (1, 2, 3)
        for split in ("train", "validation")
    ]
    found = {trace.name: (trace.x, trace.y) for trace in reward_chart(rows).data}
    assert found["Held out"] == ((1, 2, 3), (0.5, 1.0, 1.5))
    assert next(value for name, value in found.items() if name != "Held out") == ((1, 2, 3), (0.5, 1.0, 1.5))
    (divergence,) = divergence_chart(rows).data
    assert (divergence.x, divergence.y) == ((1, 2, 3), (0.25, 0.5, 0.75))
    assert {trace.y for trace in order_chart(rows).data} == {(0.5, 0.5, 0.5)}


def test_references_are_level_lines_beside_the_model(metrics: Rows) -> None:
    model, gzip, xz = bits_per_byte_chart(metrics, {"gzip -9": 2.1, "xz -9": 1.8}).data
    assert (model.x, model.y) == column(metrics, "validation", "bits_per_byte")
    assert (gzip.name, gzip.x, gzip.y) == ("gzip -9", (0, 400), (2.1, 2.1))
    assert (xz.name, xz.x, xz.y) == ("xz -9", (0, 400), (1.8, 1.8))


def test_validations_on_a_sample_are_called_so_and_the_final_score_is_not(metrics: Rows) -> None:
    rows = [*metrics, {"step": 400, "split": "score", "loss": 2.75, "bits_per_byte": 1.0625}]
    model, whole = bits_per_byte_chart(rows, is_sampled=True).data
    assert (model.name, whole.name) == ("This model (sample)", "Best checkpoint, all held-out data")
    assert (whole.x, whole.y) == ((400,), (1.0625,))
    assert [trace.name for trace in loss_chart(rows, is_sampled=True).data][2] == "Held out (sample)"
    rows = [{"step": step, "split": "validation", "reward": 0.5} for step in (1, 2)]
    assert [trace.name for trace in reward_chart(rows, is_sampled=True).data] == ["Held out (sample)"]


def test_stage_times_stand_in_their_order() -> None:
    figure = stage_times_chart({"Corpus": 31.2, "Training": 291.4, "Lost": float("nan")})
    (bars,) = figure.data
    assert (bars.y, bars.x, bars.text) == (("Corpus", "Training"), (31.2, 291.4), ("31.2 s", "4 min 51 s"))
    assert bars.orientation == "h"
    assert figure.layout.yaxis.autorange == "reversed"
    assert not stage_times_chart({}).data


@pytest.mark.parametrize("rows", [[], [{"step": 1, "split": "train", "loss": None}], [{"nothing": 1}]])
def test_without_numbers_there_is_nothing_to_draw(rows: Rows) -> None:
    assert not loss_chart(rows).data
    assert not bits_per_byte_chart(rows, {"gzip -9": 2.0}).data


def test_one_validation_can_be_seen() -> None:
    figure = bits_per_byte_chart([{"step": 5, "split": "validation", "bits_per_byte": 2.0}], {"xz -9": 1.8})
    assert "markers" in figure.data[0].mode
    assert figure.data[1].x == (0, 5)


def test_backgrounds_are_transparent_and_names_are_no_markup(metrics: Rows) -> None:
    name = '<a href="https://example.org">x</a>'
    figure = bits_per_byte_chart(metrics, {name: 1.0})
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.data[1].name == '&lt;a href="https://example.org"&gt;x&lt;/a&gt;'
    assert stage_times_chart({"<b>": 1.0}).data[0].y == ("&lt;b&gt;",)
