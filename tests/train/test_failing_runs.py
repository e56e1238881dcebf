"""What a fault of the program leaves: every whole step saved, and never weights that were half changed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sheepop.core.console import Console
from sheepop.model import LossSums
from sheepop.train import Trainer
from sheepop.train.objective import NextToken
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch

from .runs import assert_same_run, weights

MakeTrainer = Callable[..., Trainer]


class Failing(NextToken):
    """Raises at the given micro-batch of the run, counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()
        object.__setattr__(self, "calls", itertools.count(-at))  # the usual objective is frozen

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        if next(self.calls) == 0:
            raise ZeroDivisionError("a fault of the program")
        return super().loss_sums(network, batch)


def fail(*arguments: Any, **settings: Any) -> Any:
    raise ZeroDivisionError("a fault of the program")


def break_something(trainer: Trainer, what: str) -> None:
    """Lets one of the parts of a run fail for the first time after step 7."""
    broken = {"data": trainer.source.prepare, "validation": trainer.validate, "sample": trainer.sample}

    def at_last(*arguments: Any) -> Any:
        return (fail if trainer.state.step >= 7 else broken[what])(*arguments)

    match what:
        case "objective":
            trainer.runner.objective = Failing(2 * 7 + 1)  # in the second of two micro-batches
        case "data":
            trainer.source = SimpleNamespace(prepare=at_last, ahead=0, describe=lambda number: [])
        case "validation":
            trainer.validate = at_last
        case "sample":
            trainer.sample = at_last
        case "sink":
            trainer.journal._sinks = [SimpleNamespace(write=lambda row: fail() if row["step"] == 7 else None)]


@pytest.mark.parametrize(
    ("what", "step", "ema_decay"),
    [("objective", 7, None), ("data", 7, None), ("validation", 8, 0.8), ("sample", 9, 0.8), ("sink", 7, None)],
)
def test_a_fault_of_the_program_ends_the_run_with_every_whole_step_saved(
    make_trainer: MakeTrainer, what: str, step: int, ema_decay: float | None
) -> None:
    settings = {"micro_batch_size": 4, "ema_decay": ema_decay, "checkpoint_interval": 100}
    unbroken = make_trainer("unbroken", **settings)
    unbroken.run()
    first, said = make_trainer("broken", **settings), io.StringIO()
    first.console = Console(file=said)
    break_something(first, what)
    with pytest.raises(ZeroDivisionError, match="a fault of the program"):
        first.run()
    assert f"Everything up to step {step} is saved" in said.getvalue()
    assert first.checkpointer.run.pointer("latest") == first.state.step == step
    second = make_trainer("broken", resume=True, **settings)
    second.run()
    assert_same_run(unbroken, second)


@pytest.mark.parametrize("what", ["optimizer", "objective"])
def test_weights_that_were_half_changed_when_something_failed_are_not_saved(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    settings = {"checkpoint_interval": 3, "eval_interval": 100, "ema_decay": 0.8}
    unbroken = make_trainer("unbroken", **settings)
    unbroken.run()
    first, said = make_trainer("broken", **settings), io.StringIO()
    first.console = Console(file=said)

    def fail_at_the_eighth(*arguments: Any, **given: Any) -> None:
        if first.state.step == 7:
            fail()

    if what == "optimizer":
        first.runner.optimizers[0].register_step_post_hook(fail_at_the_eighth)
    else:
        monkeypatch.setattr(NextToken, "step_taken", fail_at_the_eighth)
    with pytest.raises(ZeroDivisionError):
        first.run()
    monkeypatch.undo()
    assert "The weights were being changed, so they are not saved; the last checkpoint, step 6, is valid." in " ".join(
        said.getvalue().split()
    )
    assert first.checkpointer.run.pointer("latest") == 6
    second = make_trainer("broken", resume=True, **settings)
    second.run()
    assert_same_run(unbroken, second)


def test_weights_that_are_half_exchanged_are_not_saved(make_trainer: MakeTrainer) -> None:
    """An average is put in for a validation; if that fails in its middle, the model holds some of both."""
    trainer = make_trainer("run", ema_decay=0.8, checkpoint_interval=3, sample_interval=3)
    evaluation = trainer.runner.evaluation
    put_in = evaluation._put_in

    def half() -> None:
        if trainer.state.step < 4:
            put_in()
        else:
            with torch.no_grad():
                evaluation._weights[0].copy_(evaluation._averages[0])
            fail()

    evaluation._put_in = half  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert trainer.checkpointer.run.pointer("latest") == 3


def test_a_step_that_was_taken_is_counted_before_anything_is_told_of_it(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = make_trainer("unbroken")
    unbroken.run()
    first = make_trainer("broken", checkpoint_interval=100)
    with monkeypatch.context() as patch:
        patch.setattr(NextToken, "metrics", lambda *_: fail() if first.state.step in (6, 7) else {})
        with pytest.raises(ZeroDivisionError):
            first.run()
    second = make_trainer("broken", resume=True)
    assert second.state.step == first.state.step
    second.run()
    for name, weight in weights(unbroken).items():
        assert torch.equal(weight, second.model.get_parameter(name)), name
