"""The counters of a run, through JSON and back, and in which order a checkpoint comes to the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheepop.checkpoint.training_state import read_counters
from sheepop.train import Trainer, TrainingState
from sheepop.train.loss_scale import LossScale
from sheepop.train.trouble import Window

MakeTrainer = Callable[..., Trainer]
LOGS = ("metrics.jsonl", "samples.jsonl")


def test_all_counters_come_back_from_json() -> None:
    state = TrainingState(
        step=7,
        tokens=900,
        seconds=1.5,
        best_loss=2.25,
        best_step=4,
        metrics_bytes=310,
        samples_bytes=20,
        due=("sample", "save"),
        window=Window((3.0, 2.5, 2.25), (0.5, 1.5, 0.75)),
        skips_in_a_row=1,
        rewinds=2,
        rewound_to=3,
        left_out=(5, 6),
        loss_scale=LossScale(1024.0, 17, 3),
        reference_loss=2.5,
        stale_validations=1,
    )
    record, begun = json.loads(json.dumps(asdict(state))), asdict(TrainingState())
    assert not [name for name in begun if record[name] == begun[name]]  # none is forgotten here
    assert TrainingState.from_record(record) == state


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.randoms())
def test_steps_take_the_batches_that_are_not_left_out_one_after_the_other(left_out, step, random) -> None:
    given = random.sample(sorted(left_out), len(left_out))
    taken = [number for number in range(100) if number not in left_out]
    assert TrainingState(step=step, left_out=tuple(given)).batch_number == taken[step]


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes of each file of a name are known to be on the disk."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files are read from /proc")
    sizes: dict[str, int] = {}
    fsync = os.fsync

    def record(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        fsync(descriptor)
        sizes[Path(f"/dev/fd/{descriptor}").resolve().name] = size

    monkeypatch.setattr(os, "fsync", record)
    return sizes


def test_the_logs_are_on_the_disk_before_the_checkpoint_that_counts_their_bytes(
    make_trainer: MakeTrainer, flushed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power may keep the checkpoint and lose what was not flushed; then it could not be read."""
    rename, seen = Path.rename, []

    def look(self: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            seen.append((read_counters(self), dict(flushed)))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    trainer = make_trainer("run", max_steps=6, sample_interval=2)
    trainer.run()
    assert [counters["step"] for counters, _ in seen] == trainer.checkpointer.run.steps()
    for counters, sizes in seen:
        for log, count in zip(LOGS, (counters["metrics_bytes"], counters["samples_bytes"]), strict=True):
            assert sizes[log] >= count
    assert min(seen[-1][0][key] for key in ("metrics_bytes", "samples_bytes")) > 0


def test_best_never_names_a_checkpoint_that_is_not_whole(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("run", max_steps=6, eval_interval=1)
    run, replace, named = trainer.checkpointer.run, Path.replace, []

    def look(self: Path, target: Path) -> Path:
        moved = replace(self, target)
        if target.name == "best":
            named.append(run.pointer("best"))
        return moved

    monkeypatch.setattr(Path, "replace", look)
    trainer.run()
    assert named
    assert None not in named


def test_what_is_trained_after_a_checkpoint_was_begun_is_not_in_it(make_trainer: MakeTrainer) -> None:
    """Weights and optimizer change while the checkpoint is still being written."""
    trainer, checked = make_trainer("run", ema_decay=0.9), []
    save = trainer.checkpointer.save

    def held() -> list[torch.Tensor]:
        """The trained weights, what the optimizer keeps, and the averaged weights."""
        slots = [kept for optimizer in trainer.optimizers for kept in optimizer.state.values()]
        values = [*trainer.model.parameters(), *(value for kept in slots for value in kept.values())]
        with trainer.evaluation.applied():
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


def test_best_is_pointed_at_again_where_it_is_and_forgotten_where_it_is_gone(make_trainer: MakeTrainer) -> None:
    """A run that goes back, or is resumed, may find the pointer at a later step, or its best checkpoint damaged."""
    trainer, said = make_trainer("run", max_steps=6, keep_checkpoints=9), []
    trainer.run()
    checkpointer, run = trainer.checkpointer, trainer.checkpointer.run
    state = trainer.state.after(best_loss=2.5, best_step=3)
    run.mark_best(6)
    assert checkpointer.with_best(state, said.append) == state
    assert (run.pointer("best"), said) == (3, [])
    unknown = state.after(best_loss=None, best_step=None)
    assert checkpointer.with_best(unknown, said.append) == unknown
    gone = state.after(best_step=5)
    assert checkpointer.with_best(gone, said.append) == unknown
    assert said == ["The best checkpoint, step 5, is gone; the next validation names a new one."]
