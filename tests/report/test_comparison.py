"""Curves of several runs: what is drawn over steps and over time."""

from __future__ import annotations

from typing import Any

import pytest

from sheepop.report import Curves, comparison, comparison_figure, range_test_figure, smooth

from .conftest import assert_all_is_in_its_place, of_plotly

comparison_chart = of_plotly(comparison.comparison_chart)


def rows(name: str, offset: float) -> Curves:
    found: list[dict[str, Any]] = []
    for step in range(10, 210, 10):
        found.append({"step": step, "split": "train", "loss": offset + 50 / step, "seconds": step * offset})
        if step % 50 == 0:
            score = {"loss": 99.0, "bits_per_byte": offset + 60 / step}
            found.append({"step": step, "split": "validation", **score, "seconds": step * offset})
    return Curves(name, found)


RUNS = [rows("one", 1.0), rows("two", 1.5), Curves("empty", [])]


def test_panels_hold_losses_over_steps_and_over_time() -> None:
    figure = comparison_figure(RUNS)
    by_step, by_time, train_by_step, train_by_time = figure.axes
    assert [line.get_label() for line in by_step.lines] == ["one", "two"]
    assert list(by_step.lines[1].get_xdata()) == [50, 100, 150, 200]
    assert list(by_step.lines[1].get_ydata()) == [1.5 + 60 / step for step in (50, 100, 150, 200)]
    assert list(by_time.lines[1].get_xdata()) == [75, 150, 225, 300]
    raw = [1.0 + 50 / step for step in range(10, 210, 10)]
    assert list(train_by_step.lines[0].get_ydata()) == smooth(raw, 3.0)
    assert list(train_by_time.lines[1].get_xdata()) == [1.5 * step for step in range(10, 210, 10)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_every_run_that_is_drawn_is_named_as_it_is_called() -> None:
    """Whatever a folder is called, and in whichever panel its first curve is."""
    trained_only = [row for row in rows("", 2.0).metrics if row["split"] == "train"]
    names = ["_hidden", "a$b$", r"$\frac{$", "_hidden"]
    runs = [rows(name, 1.0) for name in names[:3]] + [Curves(names[3], trained_only)]
    figure = comparison_figure(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert_all_is_in_its_place(figure)  # and nothing is taken for a formula


def test_names_of_any_length_and_number_leave_the_panels_their_room() -> None:
    for figure in (comparison_figure([rows("x" * 40 + str(k), 10.0**k) for k in range(5)]), comparison_figure([])):
        assert figure.axes[0].get_position().height * figure.get_figheight() == pytest.approx(2.65)
        assert_all_is_in_its_place(figure)


def test_a_single_value_can_be_seen() -> None:
    one = [
        Curves(
            "one",
            [
                {"step": 5, "split": split, "loss": 3.0, "bits_per_byte": 1.0, "seconds": 1.0}
                for split in ("train", "validation")
            ],
        )
    ]
    assert [axes.lines[0].get_marker() for axes in comparison_figure(one).axes] == ["o"] * 4
    for split in ("train", "validation"):
        assert comparison_chart(one, split, over="step").data[0].mode == "lines+markers"


def test_runs_that_have_not_begun_are_drawn_as_such() -> None:
    figure = comparison_figure([Curves("empty", []), Curves("other", [])])
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["No values yet"] * 4


@pytest.mark.parametrize(("over", "last"), [("step", 200), ("seconds", 300.0)])
def test_charts_hold_the_same_curves(over: Any, last: float) -> None:
    chart = comparison_chart(RUNS, "validation", over=over)
    assert [trace.name for trace in chart.data] == ["one", "two"]
    assert chart.data[1].x[-1] == last
    assert chart.data[0].line.color != chart.data[1].line.color


@pytest.mark.parametrize(("over", "place"), [("step", 150), ("seconds", 225.0)])
def test_a_sample_is_named_so_and_the_final_score_is_a_point_of_its_own(over: Any, place: float) -> None:
    score = {"step": 150, "split": "score", "loss": 99.0, "bits_per_byte": 1.75}  # which has no time of its own
    runs = [RUNS[0], Curves("two", [*RUNS[1].metrics, score], is_sampled=True)]
    chart = comparison_chart(runs, "validation", over=over)
    names = ["one", "two (sample)", "two: best checkpoint, all held-out data"]
    assert [trace.name for trace in chart.data] == names
    assert (chart.data[2].x, chart.data[2].y) == ((place,), (1.75,))
    assert [trace.name for trace in comparison_chart(runs, "train", over=over).data] == ["one", "two"]
    axes = comparison_figure(runs).axes[0 if over == "step" else 1]
    assert axes.get_title(loc="left") == "Held-out text (sample); diamonds: all of it"
    assert (list(axes.lines[2].get_xdata()), list(axes.lines[2].get_ydata())) == ([place], [1.75])


def test_many_runs_are_told_apart_by_dashes() -> None:
    chart = comparison_chart([rows(str(number), 1.0) for number in range(18)], "train", over="step")
    assert len({(trace.line.color, trace.line.dash) for trace in chart.data}) == 18


def test_a_range_test_is_drawn_with_its_two_rates() -> None:
    rates, losses = [1e-4, 1e-3, 1e-2, 1e-1], [5.0, 4.0, 3.0, 90.0]
    figure = range_test_figure(rates, losses, losses, 1e-3, 1e-2)
    assert_all_is_in_its_place(figure)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines[2:]] == [[1e-3, 1e-3], [1e-2, 1e-2]]
    assert axes.get_ylim() == pytest.approx((2.7, 5.6))
