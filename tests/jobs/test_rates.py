"""The search for a learning rate: it goes downhill, stays where it ended, and trains as runs do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.errors import UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.rates import RateFinding, downhill, find_best_rate

from ..running import train

Configured = Callable[..., SheepOpConfig]
USUAL = ("training.max_steps=8", "training.warmup_steps=2", "model.dropout=0", "training.learning_rate=0.01")


def test_a_search_goes_to_the_lowest_place_until_two_on_either_side_are_higher() -> None:
    assert downhill(lambda place: abs(place - 2.0)) == {0: 2.0, 1: 1.0, 2: 0.0, 3: 1.0, 4: 2.0}
    assert list(downhill(lambda place: abs(place + 2.0))) == [-4, -3, -2, -1, 0, 1]
    assert list(downhill(lambda place: float(place), most=6)) == [-4, -3, -2, -1, 0, 1]
    diverging = downhill(lambda place: abs(place + 3.0) if place < -1 else math.inf)
    assert list(diverging) == [-5, -4, -3, -2, -1, 0, 1]
    valleys = {-2: 3.0, -1: 2.0, 0: 1.0, 1: 2.0, 2: 0.5, 3: 2.0, 4: 3.0, 5: 0.0}  # the last is too far away
    assert downhill(valleys.__getitem__) == {place: valleys[place] for place in range(-1, 5)}


def test_a_search_from_its_own_result_ends_there() -> None:
    """On random losses: a rate that was advised is advised again, so that advice cannot go round."""
    draw = random.Random(3)
    for _ in range(200):
        losses = {place: draw.choice((1.0, 2.0, 3.0, math.inf)) + draw.random() for place in range(-40, 41)}
        found = downhill(losses.__getitem__, most=81)
        end = min(found, key=found.__getitem__)
        assert losses[end] <= min(losses[end + each] for each in (-2, -1, 1, 2))
        again = downhill({place - end: loss for place, loss in losses.items()}.__getitem__)
        assert set(again) == {-2, -1, 0, 1, 2} and min(again, key=again.__getitem__) == 0


def held_out(run: Path) -> float:
    return [row["loss"] for row in read_json_lines(run / "metrics.jsonl").rows if row["split"] == "validation"][-1]


def test_a_training_for_all_steps_is_the_run_itself(configured: Configured, tmp_path: Path) -> None:
    run = train(configured(tmp_path / "run", *USUAL)).run
    found = find_best_rate(run, share=1.0)
    assert (found.rate, found.steps, found.total) == (0.01, 8, 8)
    assert found.losses[0.01] == pytest.approx(held_out(run), rel=1e-6)
    assert len(found.losses) > 1
    for rate in sorted({*found.losses} - {0.01}):
        other = train(configured(tmp_path / f"run-{rate:.2g}", *USUAL, f"training.learning_rate={rate}")).run
        assert found.losses[rate] == pytest.approx(held_out(other), rel=1e-6)


def test_a_shorter_training_has_the_schedule_in_proportion(configured: Configured, tmp_path: Path) -> None:
    """A cosine of 8 steps with 2 of warm-up; at its steps 0, 2, 4 and 6 the rates are those of four steps."""
    run = train(configured(tmp_path / "run", *USUAL)).run
    rates = [0.5, *((1 + math.cos(math.pi * progress)) / 2 for progress in (0, 1 / 3, 2 / 3))]
    points = ",".join(f"[{step},{factor}]" for step, factor in enumerate(rates))
    piecewise = ("training.schedule=piecewise", f"training.schedule_points=[{points}]", "training.warmup_steps=null")
    short = train(configured(tmp_path / "short", *USUAL, *piecewise, "training.max_steps=4")).run
    assert find_best_rate(run, share=0.5).losses[0.01] == pytest.approx(held_out(short), rel=1e-6)


def test_a_fork_begins_with_the_weights_of_its_model(configured: Configured, tmp_path: Path) -> None:
    model = train(configured(tmp_path / "model", *USUAL)).run
    run = train(configured(tmp_path / "run", *USUAL), fork=model).run
    assert find_best_rate(run, share=1.0).losses[0.01] == pytest.approx(held_out(run), rel=1e-6)


def test_what_it_says() -> None:
    finding = RateFinding((), 0.1, 60, 240, {0.01: 2.5, 0.0316: 2.0, 0.1: 3.0, 0.316: math.inf})
    assert finding.table()[2].split() == ["0.0316", "2.0000", "0.0%"]
    assert finding.sentences() == [
        "Trained 4 times for 60 of the run's 240 steps, at the cost of 1 runs.",
        "Set training.learning_rate=0.0316, where the loss is lowest, instead of 0.1.",
    ]
    assert finding.to_dict()["tried"][3] == {"learning_rate": 0.316, "loss": None}
    right = RateFinding((), 0.1, 60, 240, {0.0316: 2.5, 0.1: 2.0, 0.316: 2.5})
    assert right.sentences()[-1] == "Leave training.learning_rate=0.1: the loss is lowest there."
    falling = RateFinding((), 0.1, 60, 240, {0.1: 2.0, 0.316: 1.5})
    assert "still falls at the last rate tried" in falling.sentences()[1]
    broken = RateFinding((), 0.1, 60, 240, {0.1: math.inf})
    assert broken.sentences()[-1].startswith("No rate was found")


def test_what_cannot_be_searched_is_refused(configured: Configured, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a training run"):
        find_best_rate(tmp_path)
    run = train(configured(tmp_path / "run", *USUAL, "data.validation_fraction=0")).run
    with pytest.raises(UsageError, match="holds nothing out"):
        find_best_rate(run)
