"""A batch that gives NaN, and one that gives a spike, under every policy."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Batch
from sheepop.model import LossSums
from sheepop.train import Trainer, TrainingError, TrainingState
from sheepop.train.objective import NextToken, Objective
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch

from .runs import Killed

MakeTrainer = Callable[..., Trainer]
STEPS = 40
CALM = {"max_steps": STEPS, "global_batch_size": 2, "micro_batch_size": 1, "learning_rate": 0.003, "dropout": 0.0}


@dataclass
class Poisoned(Objective):
    """The usual objective, whose loss is multiplied for the one row that begins with the given tokens."""

    row: np.ndarray
    factor: float
    usual: NextToken = field(default_factory=NextToken)

    def supervised(self, batch: Batch) -> int:
        return self.usual.supervised(batch)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        sums = self.usual.loss_sums(network, batch)
        is_poison = bool((batch.inputs["input_ids"] == torch.from_numpy(self.row)).all(-1).any())
        return times(sums, self.factor) if is_poison else sums


def times(sums: LossSums, factor: float) -> LossSums:
    return LossSums(sums.objective * factor, sums.cross_entropy * factor)


@pytest.fixture
def poisoned(make_trainer: MakeTrainer) -> MakeTrainer:
    """A trainer for which the first row of the batch of step `at` is poison."""

    def make(name: str, factor: float, *, at: int = 30, resume: bool = False, **trouble: Any) -> Trainer:
        settings = {**CALM, "trouble": {"window": 16, **trouble}}
        trainer = make_trainer(name, resume=resume, **settings)
        trainer.runner.objective = Poisoned(trainer.source.schedule.batch(at - 1).input_ids[0], factor)
        trainer.source = replace(trainer.source, documents=lambda number: [f"a document of batch {number}"])
        return trainer

    return make


def rows(trainer: Trainer, split: str) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(trainer.journal.metrics.path)[0] if row["split"] == split]


def last_loss(trainer: Trainer) -> float:
    return rows(trainer, "validation")[-1]["loss"]


TROUBLES = [("non_finite", float("nan")), ("spike", 1e4)]


@pytest.mark.parametrize(("key", "factor"), TROUBLES)
def test_stop_saves_what_was_good_and_names_the_documents(poisoned: MakeTrainer, key: str, factor: float) -> None:
    trainer = poisoned("run", factor, **{key: "stop"})
    with pytest.raises(TrainingError, match=rf"Step 30 gave .*training\.trouble\.{key}"):
        trainer.run()
    assert trainer.checkpointer.run.pointer("latest") == 29
    (row,) = rows(trainer, "trouble")
    assert row["documents"] == ["a document of batch 29"]
    assert (row["at_step"], row["policy"]) == (30, "stop")


@pytest.mark.parametrize(("key", "factor"), TROUBLES)
def test_skip_leaves_the_weights_as_they_are_for_one_step(
    poisoned: MakeTrainer, make_trainer: MakeTrainer, key: str, factor: float
) -> None:
    trainer = poisoned("run", factor, **{key: "skip"})
    trainer.run()
    assert [row["at_step"] for row in rows(trainer, "trouble")] == [30]
    assert 30 not in [row["step"] for row in rows(trainer, "train")]
    calm = make_trainer("calm", **CALM)
    calm.run()
    assert last_loss(trainer) == pytest.approx(last_loss(calm), rel=0.1)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_skips_with_good_steps_between_them_are_not_in_a_row(poisoned: MakeTrainer) -> None:
    trainer = poisoned("run", float("nan"), at=30, non_finite="skip", max_skips=1)
    other = trainer.source.schedule.batch(24).input_ids[0]
    trainer.runner.objective.usual = Poisoned(other, float("nan"))
    met = [
        step
        for step in range(1, STEPS + 1)
        for row in trainer.source.schedule.batch(step - 1).input_ids
        if (row == trainer.runner.objective.row).all() or (row == other).all()
    ]
    trainer.run()
    assert [row["at_step"] for row in rows(trainer, "trouble")] == met
    assert {25, 30} <= set(met)
    assert trainer.state.step == STEPS


@pytest.mark.parametrize(("key", "factor"), TROUBLES)
def test_rewind_goes_on_as_if_the_batch_had_never_been_there(
    poisoned: MakeTrainer, make_trainer: MakeTrainer, key: str, factor: float
) -> None:
    trainer = poisoned("run", factor, **{key: "rewind"})
    trainer.run()
    assert trainer.state.left_out == (29,)
    assert trainer.state.rewinds == 1
    # The same as a run that knew from the beginning which batch to leave out.
    knowing = make_trainer("knowing", **CALM)
    knowing.state = knowing.state.after(left_out=(29,))
    knowing.run()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, knowing.model.get_parameter(name)), name
    kept = [row["step"] for row in rows(trainer, "train")]
    assert kept == list(range(1, STEPS + 1))  # no line is missing, none is there twice


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "documents that cannot be named"), (20, ", 18, 19."), (23, ", 18, 19 and 3 more.")],
)
def test_a_batch_of_many_documents_is_named_by_the_first_of_them(poisoned: MakeTrainer, count: int, words: str) -> None:
    trainer, said = poisoned("run", float("nan"), at=1, non_finite="stop"), io.StringIO()
    trainer.source = replace(trainer.source, documents=lambda number: [str(name) for name in range(count)])
    trainer.console = Console(file=said)
    with pytest.raises(TrainingError):
        trainer.run()
    assert words in " ".join(said.getvalue().split())


@dataclass
class Fickle(Poisoned):
    """Gives other bits the first time that it sees that row."""

    has_seen: bool = False

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        sums = self.usual.loss_sums(network, batch)
        if self.has_seen or not (batch.inputs["input_ids"] == torch.from_numpy(self.row)).all():
            return sums
        self.has_seen = True
        return times(sums, self.factor)


def test_a_rewind_cuts_what_comes_again_and_keeps_what_does_not(poisoned: MakeTrainer) -> None:
    """From step 30 the run goes back to 27; before, a batch was skipped at 28 and a computation went wrong at 29."""
    trainer = poisoned("run", 1e4, at=30, spike="rewind", non_finite="skip")
    fickle = Fickle(trainer.source.schedule.batch(28).input_ids[0], 1.001)
    trainer.runner.objective.usual = Poisoned(
        trainer.source.schedule.batch(27).input_ids[0], float("nan"), usual=fickle
    )
    # No best checkpoint between 27 and 30.
    trainer.agenda = replace(trainer.agenda, verify_interval=29, eval_interval=STEPS)
    trainer.run()
    assert [(row["at_step"], row["policy"]) for row in rows(trainer, "trouble")] == [(30, "rewind"), (28, "skip")]
    (corruption,) = rows(trainer, "verification")
    assert corruption["differences"][0].startswith("loss: ")
    kept = [row["step"] for row in rows(trainer, "train")]
    assert kept == [step for step in range(1, STEPS + 1) if step != 28]


def test_rewind_is_the_same_for_a_run_that_is_stopped_and_resumed(poisoned: MakeTrainer) -> None:
    unbroken = poisoned("unbroken", float("nan"), non_finite="rewind")
    unbroken.run()
    first = poisoned("stopped", float("nan"), non_finite="rewind")
    save = first.checkpointer.save

    def stop_at_33(state: Any, **callbacks: Any) -> None:
        if state.step == 33:
            raise Killed
        save(state, **callbacks)

    first.checkpointer.save = stop_at_33
    with pytest.raises(Killed):
        first.run()
    second = poisoned("stopped", float("nan"), non_finite="rewind", resume=True)
    assert second.state.left_out == (29,)
    second.run()
    for name, parameter in unbroken.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name


class Hopeless(NextToken):
    """Every batch gives NaN once the model has taken so many steps."""

    def __init__(self, trainer: Trainer, after: int) -> None:
        super().__init__()
        object.__setattr__(self, "trainer", trainer)  # the usual objective is frozen
        object.__setattr__(self, "after", after)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        factor = float("nan") if self.trainer.state.step >= self.after else 1.0
        return times(super().loss_sums(network, batch), factor)


@pytest.mark.parametrize(
    ("policy", "words", "troubles"),
    [("skip", "after 4 steps were skipped in a row", 5), ("rewind", "after 2 rewinds", 3)],
)
def test_a_run_that_nothing_helps_is_given_up(
    make_trainer: MakeTrainer, policy: str, words: str, troubles: int
) -> None:
    trainer = make_trainer("run", **CALM, trouble={"non_finite": policy, "max_skips": 4, "max_rewinds": 2})
    trainer.runner.objective = Hopeless(trainer, 20)
    with pytest.raises(TrainingError, match=words):
        trainer.run()
    found = read_json_lines(trainer.journal.metrics.path)[0]
    assert sum(row["split"] == "trouble" for row in found) == troubles
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_a_checkpoint_gone_back_to_in_vain_is_not_gone_back_to_at_once_again(make_trainer: MakeTrainer) -> None:
    settings = {"checkpoint_interval": 10, "eval_interval": 100}
    trainer = make_trainer("run", **CALM, **settings, trouble={"non_finite": "rewind", "max_rewinds": 2})
    trainer.runner.objective = Hopeless(trainer, 25)
    trainer.source = replace(trainer.source, documents=lambda number: [f"a document of batch {number}"])
    steps, go_back = [], trainer.go_back

    def noted(step: int) -> TrainingState:
        state = go_back(step)
        steps.append((step, trainer.checkpointer.run.pointer("latest")))
        return state

    trainer.go_back = noted
    with pytest.raises(TrainingError):
        trainer.run()
    assert steps == [(20, 20), (10, 10)]
    assert [(row["batch"], row.get("back_to")) for row in rows(trainer, "trouble")] == [(25, 20), (26, 10), (27, None)]
    # The batch that was met, which is no more the one of the step's number since one before it was left out.
    named = [row["documents"] for row in rows(trainer, "trouble")]
    assert named == [[f"a document of batch {number}"] for number in (25, 26, 27)]


def test_the_beginning_is_a_checkpoint_where_a_run_may_go_back(poisoned: MakeTrainer, tmp_path: Path) -> None:
    trainer = poisoned("run", float("nan"), at=2, non_finite="rewind")
    trainer.run()
    assert trainer.state.left_out == (1,)
    assert trainer.state.step == STEPS
