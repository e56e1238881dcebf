"""Runs that end before their last step because the held-out loss no longer falls."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sheepop.core.errors import ConfigError, Interrupted
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import load_config
from sheepop.train import TokenScores, Trainer, TrainingState
from sheepop.train.agenda import EarlyStopping

MakeTrainer = Callable[..., Trainer]


def scores(loss: float) -> TokenScores:
    return TokenScores(loss=loss, perplexity=1.0, accuracy=0.0, bits_per_byte=loss, tokens=1, bytes=1)


def script(trainer: Trainer, losses: Sequence[float]) -> None:
    """Validations give `losses`, by the step they come at: every second one of the run."""
    trainer.validate = lambda: scores(losses[trainer.state.step // 2 - 1])


SETTINGS: dict[str, Any] = {"max_steps": 20, "eval_interval": 2, "checkpoint_interval": 5, "keep_checkpoints": 20}
LOSSES = [5.0, 4.0, 4.5, 3.9, 3.95, 3.85, 3.86, 3.84, 3.0, 2.0]


@pytest.mark.parametrize(
    ("patience", "delta", "last"),
    [
        (1, 0.0, 6),  # 4.5 is no improvement
        (2, 0.0, 20),  # never two in a row
        (2, 0.2, 8),  # nor is 3.9, within 0.2 of 4.0
        (4, 0.2, 12),
        (6, 0.2, 16),
        (7, 0.2, 20),  # 3.0 comes before the seventh
        (None, 0.0, 20),
    ],
)
def test_the_run_ends_when_patience_does(
    make_trainer: MakeTrainer, patience: int | None, delta: float, last: int
) -> None:
    trainer = make_trainer("run", early_stopping=patience, early_stopping_delta=delta, **SETTINGS)
    script(trainer, LOSSES)
    assert trainer.run().step == last
    assert trainer.checkpointer.run.pointer("latest") == last


def test_a_loss_that_is_no_number_is_never_the_best_and_counts_as_no_improvement(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", early_stopping=3, **SETTINGS)
    script(trainer, [math.nan, math.inf, 5.0, math.nan, 4.0, math.inf, math.nan, 4.5, 1.0])
    state = trainer.run()
    assert (state.step, state.best_loss, state.best_step, state.reference_loss) == (16, 4.0, 10, 4.0)
    assert trainer.checkpointer.run.pointer("best") == 10
    assert trainer.checkpointer.load(16) == state
    hopeless = make_trainer("hopeless", early_stopping=3, **SETTINGS)
    script(hopeless, [math.nan] * 10)
    assert hopeless.run().step == 6
    assert hopeless.checkpointer.run.pointer("best") is None


def slow_count(losses: Sequence[float], patience: int, delta: float) -> int | None:
    """After which of the losses to stop, by looking back over all of them."""
    for end in range(1, len(losses) + 1):
        reference, stale = losses[0], 0
        for loss in losses[1:end]:
            stale = 0 if loss < reference - delta else stale + 1
            reference = loss if stale == 0 else reference
        if stale >= patience:
            return end
    return None


@pytest.mark.parametrize("patience", [1, 2, 3, 4])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5, 1.5])
def test_counting_agrees_with_looking_back(patience: int, delta: float) -> None:
    rule, state, stopped = EarlyStopping(patience, delta), TrainingState(), None
    for number, loss in enumerate(LOSSES, start=1):
        state = rule.after(state, loss)
        if rule.is_over(state) and stopped is None:
            stopped = number
    assert stopped == slow_count(LOSSES, patience, delta)


def test_a_resumed_run_ends_where_the_unbroken_one_does(make_trainer: MakeTrainer) -> None:
    settings = {**SETTINGS, "early_stopping": 3}
    losses = [5.0, 5.1, 5.2, 4.9, 5.0, 5.1, 5.2, 1.0, 1.0, 1.0]
    unbroken = make_trainer("unbroken", **settings)
    script(unbroken, losses)
    assert unbroken.run().step == 14
    first = make_trainer("broken", **settings)
    script(first, losses)
    first.sample = lambda step: (os.kill(os.getpid(), signal.SIGINT) or []) if step == 12 else []
    with pytest.raises(Interrupted, match="after step 12 of 20"):
        first.run()
    second = make_trainer("broken", resume=True, **settings)
    assert (second.state.stale_validations, second.state.reference_loss) == (2, 4.9)
    script(second, losses)
    assert second.run().step == 14


def test_a_finished_run_stays_finished_until_it_gets_more_patience(make_trainer: MakeTrainer) -> None:
    losses = [5.0, 6.0, 6.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    first = make_trainer("run", early_stopping=2, **SETTINGS)
    script(first, losses)
    assert first.run().step == 6
    rows = read_json_lines(first.checkpointer.run.metrics_file)[0]
    again = make_trainer("run", resume=True, early_stopping=2, **SETTINGS)
    assert again.run().step == 6
    assert read_json_lines(again.checkpointer.run.metrics_file)[0] == rows
    patient = make_trainer("run", resume=True, early_stopping=4, **SETTINGS)
    script(patient, losses)
    assert patient.run().step == 18


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("training.early_stopping=0", "early_stopping"),
        ("training.early_stopping_delta=0.1", "has no effect without early_stopping"),
        ("training.sinks=[tensorboard, tensorboard]", "names a sink twice"),
    ],
)
def test_settings_without_sense_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[settings])
