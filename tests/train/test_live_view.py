"""What a person sees of a run: the facts of the panel, and the words where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sheepop.core.facts import Fact, Text
from sheepop.train import Trainer
from sheepop.train.live_view import LiveView, curve


@dataclass
class Shown:
    words: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def advance(self, amount: float = 1) -> None:
        pass

    def resize(self, total: float) -> None:
        pass

    def describe(self, detail: str) -> None:
        self.words = detail

    def show(self, facts: Sequence[Fact | Text]) -> None:
        self.facts = {fact.label: fact.value for fact in facts}
        self.texts = [fact.label for fact in facts if isinstance(fact, Text)]


def row(step: int, **values: Any) -> dict[str, Any]:
    train = {"step": step, "split": "train", "loss": 3.25, "learning_rate": 0.00095, "grad_norm": 0.625}
    return {**train, "tokens": 51200, "tokens_per_second": 12345.6, "mfu": 0.4321, "seconds": 9.0, **values}


def held_out(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "split": "validation", "loss": loss, "bits_per_byte": loss / 2}


def view(shown: Shown, done: int = 0, nominal: float | None = None) -> tuple[LiveView, list[float]]:
    now = [1000.0]
    return LiveView(shown, 1000, done, "cpu", "bf16", 2.0e12, nominal, clock=lambda: now[0]), now


def test_the_best_of_earlier_sessions_is_remembered(make_trainer: Callable[..., Trainer]) -> None:
    first = make_trainer("run", max_steps=8)
    first.run()
    assert first.state.best == (first.state.best_loss, first.state.best_step)
    resumed = make_trainer("run", resume=True, max_steps=12, learning_rate=30.0)
    assert resumed.state.best == first.state.best
    resumed.run()
    (loss, step), last = first.state.best, resumed.journal._view._validation["loss"]
    assert last > loss
    assert f"(best {loss:.4f} at step {step})" in resumed.journal._view._scores()


def test_a_loss_that_is_no_number_is_not_shown_as_the_best() -> None:
    shown = Shown()
    live, _ = view(shown)
    live.update(held_out(100, math.nan))
    assert "best" not in shown.facts["Held out"]
    live.update(held_out(200, 4.0))
    assert shown.facts["Held out"].endswith("the best so far")


def test_numbers_stand_in_the_panel() -> None:
    shown = Shown()
    live, now = view(shown)
    now[0] += 50
    live.update(row(100))
    memory = shown.facts.pop("Memory")
    assert memory.endswith(("MB", "GB"))
    assert shown.facts == {
        "Step": "100 of 1,000",
        "Loss": "3.2500",
        "Gradient norm": "0.625",
        "Learning rate": "9.50e-04",
        "Tokens/s": "12,346",
        "Tokens": "51,200",
        "Loss so far": "▁",
        "Time left": "7 min 30 s",  # 100 steps in 50 s, 900 to go
        "MFU": "43.2% of 2 TFLOP/s, the matrix peak measured in bf16",
    }
    assert shown.words.startswith("loss 3.250  lr 9.50e-04  norm 0.62  12,346 tokens/s  43% MFU  ")


def test_time_left_counts_the_steps_of_this_session_only() -> None:
    shown = Shown()
    live, now = view(shown, done=900)
    now[0] += 30
    live.update(row(910))
    assert shown.facts["Time left"] == "4 min 30 s"


def test_the_last_and_the_best_validation_and_the_last_sample_are_shown() -> None:
    shown = Shown()
    live, _ = view(shown)
    live.update(held_out(20, 4.0))
    assert shown.facts["Held out"] == "step 20: loss 4.0000, 2.0000 bits per byte, the best so far"
    live.update(held_out(40, 4.5))
    assert shown.facts["Held out"] == "step 40: loss 4.5000, 2.2500 bits per byte (best 4.0000 at step 20)"
    assert shown.facts["Loss"] == "–"
    live.is_sampled = True
    live.update(held_out(60, 3.0))
    assert shown.facts["Held out"] == "step 60: loss 3.0000, 1.5000 bits per byte (sample), the best so far"


def test_the_first_text_of_a_session_stands_beside_the_last() -> None:
    shown = Shown()
    live, _ = view(shown)
    for step, text in ((0, "xq\n"), (20, " shep\n"), (40, " sheep\nAh")):
        live.sampled({"step": step, "prompt": "Oh", "text": text})
    assert shown.texts == ["Step 0", "Step 40"]
    assert (shown.facts["Step 0"], shown.facts["Step 40"]) == ("Ohxq\n", "Oh sheep\nAh")


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 8, "–"),
        ([math.nan], 8, "–"),
        ([5.0], 8, "▁"),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8, "█▇▆▅▄▃▂▁"),
        ([9.0, 7.0, math.inf, 1.0, 1.0], 2, "█▁"),  # means of 8 and 1
        ([3.0] * 100, 5, "▁▁▁▁▁"),
    ],
)
def test_the_curve_of_the_loss(values: list[float], width: int, expected: str) -> None:
    assert curve(values, width) == expected


def test_shares_say_of_which_peak_they_are() -> None:
    shown = Shown()
    LiveView(shown, 9, 0, "cpu", "fp32", 76.5e9).update(row(1))
    assert shown.facts["MFU"] == "43.2% of 76.5 GFLOP/s, the matrix peak measured in fp32"
    live, _ = view(shown, nominal=9.89e14)
    live.update(row(1, mfu_nominal=0.0123))
    assert shown.facts["MFU"] == "43.2% of 2 TFLOP/s, the matrix peak measured in bf16; 1.2% of the nominal 989 TFLOP/s"
