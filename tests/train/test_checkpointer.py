"""Checkpoints are taken of one moment, speak of what is on the disk, and name the best that is there."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import StorageError
from sheepop.core.json_lines import read_json_lines
from sheepop.train import Trainer, TrainingState

MakeTrainer = Callable[..., Trainer]


def test_a_checkpoint_is_written_when_its_logs_are_on_the_disk_and_named_when_it_is(
    make_trainer: MakeTrainer, disk_order: list[str]
) -> None:
    trainer = make_trainer("run", max_steps=4, checkpoint_interval=4, eval_interval=4)
    disk_order.clear()
    trainer.run()
    (written,) = (number for number, event in enumerate(disk_order) if event.endswith(" -> step-00000004"))
    begins = max(number for number, event in enumerate(disk_order[:written]) if event == "metrics.jsonl")
    ends = [event.rpartition(" -> ")[2] for event in disk_order[written:] if " -> " in event]
    assert disk_order[begins : begins + 2] == ["metrics.jsonl", "samples.jsonl"]
    assert not any("step-00000004" in event for event in disk_order[:begins])
    assert ends[:3] == ["step-00000004", "latest", "best"]
    assert all(name.startswith(".step-") for name in ends[3:])  # what is removed goes last


def test_what_is_trained_after_a_checkpoint_was_begun_is_not_in_it(make_trainer: MakeTrainer) -> None:
    """Weights and optimizer change while the checkpoint is still being written."""
    trainer, checked = make_trainer("run", ema_decay=0.9), []
    save = trainer.checkpointer.save

    def held() -> list[torch.Tensor]:
        """The trained weights, what the optimizer keeps, and the averaged weights."""
        slots = [kept for optimizer in trainer.runner.optimizers for kept in optimizer.state.values()]
        values = [*trainer.model.parameters(), *(value for kept in slots for value in kept.values())]
        with trainer.runner.evaluation.applied():
            averages = [weight.detach().clone() for weight in trainer.model.parameters()]
        return [*values, *averages]

    def spoiling(state: TrainingState, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        as_saved = [value.detach().clone() for value in held()]

        def spoil() -> None:
            before()
            with torch.no_grad():
                for value in held():
                    value.fill_(-1.0)

        save(state, before=spoil, after=after)
        trainer.checkpointer.wait()
        assert trainer.checkpointer.load(state.step) == state
        assert all(torch.equal(*pair) for pair in zip(held(), as_saved, strict=True))
        checked.append(state.step)

    trainer.checkpointer.save = spoiling
    trainer.run()
    assert checked


@pytest.mark.parametrize("pointer", ["missing", "another"])
def test_the_best_that_a_state_knows_of_is_pointed_at_again(make_trainer: MakeTrainer, pointer: str) -> None:
    trainer = make_trainer("run")
    checkpointer, run, warnings = trainer.checkpointer, trainer.checkpointer.run, list[str]()
    for step in (1, 2):
        checkpointer.save(TrainingState(step=step))
    checkpointer.wait()
    if pointer == "another":
        run.mark_best(2)
    state = TrainingState(step=2, best_loss=0.5, best_step=1)
    assert checkpointer.with_best(state, warnings.append) == state
    assert run.pointer("best") == 1
    assert warnings == []
    checkpointer.close()


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_a_best_that_is_lost_is_not_what_the_run_means_any_more(make_trainer: MakeTrainer, loss: str) -> None:
    trainer = make_trainer("run")
    checkpointer, run, warnings = trainer.checkpointer, trainer.checkpointer.run, list[str]()
    for step in (1, 2):
        checkpointer.save(TrainingState(step=step))
    checkpointer.close()
    run.mark_best(1)
    if loss == "gone":
        shutil.rmtree(run.checkpoint(1))
    else:
        (run.checkpoint(1) / "model.safetensors").write_bytes(b"")
    state = TrainingState(step=2, best_loss=0.5, best_step=1)
    assert checkpointer.with_best(state, warnings.append) == TrainingState(step=2)
    (warning,) = warnings
    assert re.match(rf"The best checkpoint, step 1, is {loss}.*; the next validation chooses a new one\.", warning)
    assert ("model.safetensors is damaged" in warning) == (loss == "damaged")
    assert run.pointer("best") is None
    assert load_model(run.path).directory == run.checkpoint(2)


def test_a_run_that_was_killed_before_it_pruned_does_so_when_it_goes_on(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", keep_checkpoints=1)
    trainer.run()
    run, pruned = trainer.checkpointer.run, trainer.checkpointer.run.steps()
    assert 7 not in pruned
    with run.write_checkpoint(7) as directory:
        (directory / "config.json").write_text("{}")
    run.mark_latest(12)
    make_trainer("run", resume=True, keep_checkpoints=1).run()
    assert run.steps() == pruned


def test_a_last_checkpoint_that_cannot_be_written_is_not_the_end_of_a_run(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, point = make_trainer("run"), RunDirectory._point

    def refused(run: RunDirectory, name: str, step: int) -> None:
        if step == 12:
            raise StorageError("the disk is full")
        point(run, name, step)

    monkeypatch.setattr(RunDirectory, "_point", refused)
    with pytest.raises(StorageError, match="the disk is full"):
        trainer.run()


def test_a_run_that_goes_back_has_no_later_checkpoint_and_no_later_row(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run")
    trainer.run()
    run = trainer.checkpointer.run
    before = run.steps()
    assert trainer.go_back(3).step == run.pointer("latest") == 3
    assert run.steps() == [step for step in before if step <= 3]
    for file in (run.metrics_file, run.samples_file):
        assert max(row["step"] for row in read_json_lines(file)[0]) == 3


def test_a_batch_that_is_left_out_is_passed_over_by_every_step_after_it() -> None:
    for left_out in itertools.permutations((2, 3, 5)):
        numbers = [TrainingState(step=step, left_out=left_out).batch_number for step in range(6)]
        assert numbers == [0, 1, 4, 6, 7, 8]
