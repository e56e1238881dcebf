from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from sheepop.report import save_png, smooth, training_curves

from .conftest import assert_all_is_in_its_place

Rows = list[dict[str, Any]]
TITLES = ["Loss (nats per token)", "Learning rate", "Gradient norm before clipping", "Tokens per second"]


def nan_to_none(values: Any) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]


def test_panels_hold_the_metrics(metrics: Rows) -> None:
    figure = training_curves(metrics)
    loss, rate, norm, speed = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == TITLES
    train = [row for row in metrics if row["split"] == "train"]
    held_out = [row for row in metrics if row["split"] == "validation"]
    raw, average, validation = loss.lines
    assert nan_to_none(raw.get_ydata()) == [row["loss"] for row in train]
    assert list(raw.get_xdata()) == [row["step"] for row in train]
    assert nan_to_none(average.get_ydata()) == smooth([row["loss"] for row in train], 3.0)
    assert list(validation.get_ydata()) == [row["loss"] for row in held_out]
    assert list(validation.get_xdata()) == [row["step"] for row in held_out]
    assert validation.get_label() == "Held out"
    assert training_curves(metrics, is_sampled=True).axes[0].lines[2].get_label() == "Held out (sample)"
    for axes, key in ((rate, "learning_rate"), (norm, "grad_norm"), (speed, "tokens_per_second")):
        assert list(axes.lines[0].get_ydata()) == [row[key] for row in train]


def test_the_loads_of_experts_have_a_panel_of_their_own() -> None:
    row = {"split": "train", "loss": 2.0, "expert_load_min": 0.25}
    figure = training_curves([{"step": step, "expert_load_max": 4.0 / step, **row} for step in (1, 2)])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [*TITLES, "Load of the experts, relative to even"]
    most, least = figure.axes[-1].lines
    assert (list(most.get_ydata()), list(least.get_ydata())) == ([4.0, 2.0], [0.25, 0.25])
    assert figure.axes[-1].get_ylim()[0] == 0


def test_png_is_written_whole_and_repeatably(metrics: Rows, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_png(training_curves(metrics), tmp_path / "plots" / f"{name}.png")
    first = (tmp_path / "plots" / "a.png").read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert first == (tmp_path / "plots" / "b.png").read_bytes()
    assert imread(io.BytesIO(first)).shape == (1008, 1584, 4)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "split": "train", "loss": None}],
        [{"step": 1, "split": "train", "loss": 3.0, "tokens_per_second": 0.0}],
        [{"step": step, "split": "train", "loss": (-1) ** step * 1.7e308, "grad_norm": 1e100} for step in range(20)],
        [{"step": 10**step, "split": "train", "loss": 1.0} for step in range(0, 400, 50)],
        [{"step": 10**5 + step, "split": "train", "loss": 2 + step * 1e-6, "grad_norm": 12e-5} for step in range(20)],
        [{"step": step, "split": "train", "tokens_per_second": 8e5, "expert_load_max": 3.0} for step in range(20)],
    ],
    ids=["nothing", "no number", "one point", "the largest floats", "absurd steps", "small changes", "long numbers"],
)
def test_any_metrics_give_a_picture(rows: Rows, tmp_path: Path) -> None:
    figure = training_curves(rows)
    save_png(figure, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert_all_is_in_its_place(figure)


def test_global_state_is_left_alone(metrics: Rows) -> None:
    from matplotlib import pyplot

    before = dict(pyplot.rcParams)
    training_curves(metrics)
    assert pyplot.get_fignums() == []
    assert dict(pyplot.rcParams) == before
