"""Stopping anywhere changes nothing: by a signal, by data that vanishes, by a kill, with a damaged checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.core.errors import CheckpointError, DataError, Interrupted
from sheepop.core.interrupts import Interruption
from sheepop.data import Batch, BatchSchedule, Corpus, PackedBatches
from sheepop.train import Trainer, validate
from sheepop.train.config import OPTIMIZER_NAMES

from .conftest import trainers
from .runs import WARM_UPS, Killed, assert_same_run, settings_of, timeless, weights

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="module")
def unbroken(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A run with the usual settings that nothing disturbed, at its end."""
    with trainers(corpus, tmp_path_factory.mktemp("unbroken")) as make:
        trainer = make("run")
        trainer.run()
        yield trainer


@dataclass
class InterruptedSchedule:
    """Sends this process SIGINT, as Ctrl-C does, in the middle of step number `step`."""

    schedule: BatchSchedule
    step: int

    def pieces(self, step: int) -> int:
        return self.schedule.pieces(step)

    def batch(self, step: int) -> Batch:
        if step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return self.schedule.batch(step)


@pytest.mark.parametrize(
    ("optimizer", "ema_decay"), [("adamw", None), ("muon", None), ("adamw", 0.8), ("schedule_free_adamw", None)]
)
def test_resumed_from_any_checkpoint_a_run_is_the_same_bit_for_bit(
    make_trainer: MakeTrainer, optimizer: str, ema_decay: float | None
) -> None:
    settings = settings_of(optimizer, ema_decay)
    unbroken = make_trainer("unbroken", **settings)
    unbroken.run()
    for step in (1, 5, 8):  # steps that are taken; the next is left in its middle
        first = make_trainer(f"stopped-{step}", **settings, prefetch=0)
        first.source = replace(first.source, schedule=InterruptedSchedule(first.source.schedule, step + 1))
        with pytest.raises(Interrupted, match=f"after step {step} of 12"):
            first.run()
        second = make_trainer(f"stopped-{step}", resume=True, **settings)
        assert second.state.step == step
        second.run()
        assert_same_run(unbroken, second)
        for file in (first.checkpointer.run.checkpoint(12)).rglob("*.safetensors"):
            again = unbroken.checkpointer.run.checkpoint(12) / file.relative_to(first.checkpointer.run.checkpoint(12))
            assert file.read_bytes() == again.read_bytes(), file


def test_with_ngrams_and_convolutions_a_resumed_run_is_the_same_bit_for_bit(make_trainer: MakeTrainer) -> None:
    settings: dict[str, Any] = {
        "network": {"ngrams": {"orders": (2, 3), "rows": 50}, "short_convolution": 3, "position_encoding": "rope"},
        "optimizer": "muon",
        "micro_batch_size": 4,
        "verify_interval": 2,
    }
    unbroken = make_trainer("unbroken", **settings)
    unbroken.run()
    assert all(parameter.detach().any() for parameter in unbroken.model.parameters())
    assert "verification" not in {row["split"] for row in timeless(unbroken.journal.metrics.path)}
    first = make_trainer("stopped", prefetch=0, **settings)
    first.source = replace(first.source, schedule=InterruptedSchedule(first.source.schedule, 6))
    with pytest.raises(Interrupted, match="after step 5 of 12"):
        first.run()
    second = make_trainer("stopped", resume=True, **settings)
    second.run()
    assert_same_run(unbroken, second)


def test_with_warm_ups_a_resumed_run_is_the_same_bit_for_bit(make_trainer: MakeTrainer) -> None:
    unbroken = make_trainer("unbroken", **WARM_UPS)
    unbroken.run()
    for step in (1, 3, 5):
        first = make_trainer(f"stopped-{step}", prefetch=0, **WARM_UPS)
        first.source = replace(first.source, schedule=InterruptedSchedule(first.source.schedule, step + 1))
        with pytest.raises(Interrupted, match=f"after step {step} of 12"):
            first.run()
        second = make_trainer(f"stopped-{step}", resume=True, **WARM_UPS)
        second.run()
        assert_same_run(unbroken, second)


@pytest.mark.parametrize(
    ("optimizer", "ema_decay"),
    [
        (optimizer, ema_decay)
        for optimizer in OPTIMIZER_NAMES
        for ema_decay in (None, 0.8)
        if (optimizer, ema_decay) != ("schedule_free_adamw", 0.8)  # refused: it averages already
    ],
)
def test_steps_saved_and_read_and_more_steps_are_as_many_steps_unbroken(
    make_trainer: MakeTrainer, optimizer: str, ema_decay: float | None
) -> None:
    settings = {"micro_batch_size": 4, "max_steps": 6, "prefetch": 0, **settings_of(optimizer, ema_decay)}
    unbroken, first = make_trainer("unbroken", **settings), make_trainer("stopped", **settings)
    unbroken.run()
    first.source = replace(first.source, schedule=InterruptedSchedule(first.source.schedule, 4))
    with pytest.raises(Interrupted):
        first.run()
    second = make_trainer("stopped", resume=True, **settings)
    assert second.state == first.state
    assert second.state.step == 3
    second.run()
    one, other = (trainer.checkpointer.run.checkpoint(6) for trainer in (unbroken, second))
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert len(files) == 2 + second.runner.evaluation.differ
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(make_trainer: MakeTrainer, number: int, exit_code: int) -> None:
    trainer = make_trainer("run", sample_interval=5, checkpoint_interval=100)
    trainer.sample = lambda step: os.kill(os.getpid(), number) or []
    with pytest.raises(Interrupted, match="after step 5 of 12") as caught:
        trainer.run()
    assert caught.value.exit_code == exit_code
    assert trainer.checkpointer.run.pointer("latest") == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)])
def test_a_warning_and_the_wish_to_end_after_it_save_as_one_signal_does(
    make_trainer: MakeTrainer, numbers: tuple[int, int]
) -> None:
    """Batch systems warn, then end; and whoever passes signals on may send one twice."""
    trainer = make_trainer("run", sample_interval=5, checkpoint_interval=100)
    trainer.sample = lambda step: os.kill(os.getpid(), numbers[0]) or []
    save = trainer.save

    def interrupted() -> None:
        if trainer.state.step == 5:
            os.kill(os.getpid(), numbers[1])
        save()

    trainer.save = interrupted
    with pytest.raises(Interrupted, match="after step 5 of 12; everything is saved") as caught:
        trainer.run()
    assert caught.value.exit_code == 128 + numbers[0]
    assert trainer.checkpointer.run.pointer("latest") == 5


def test_a_second_ctrl_c_does_not_wait(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", sample_interval=5, checkpoint_interval=100)
    trainer.sample = lambda step: os.kill(os.getpid(), signal.SIGINT) or []
    trainer.save = lambda: os.kill(os.getpid(), signal.SIGINT) if trainer.state.step == 5 else None
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


class InterruptedAt(Interruption):
    """An interruption that comes at the given one of the places where the loop may be left, or in the middle of it."""

    def __init__(self, place: int, *, inside: bool) -> None:
        super().__init__()
        self.place, self.inside = place, inside

    @contextmanager
    def leaving(self) -> Iterator[None]:
        self.place -= 1
        if self.place == 0 and not self.inside:
            self.arrived(signal.SIGINT)
        with super().leaving():
            yield
            if self.place == 0:
                self.arrived(signal.SIGINT)


@pytest.mark.parametrize("inside", [False, True])
def test_left_everywhere_a_run_goes_on_to_the_same_bits(
    make_trainer: MakeTrainer, unbroken: Trainer, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Every session passes one of the places where the loop may be left, and is left at the next."""
    trainer, places = make_trainer("run"), 0
    patched = partial(InterruptedAt, 2, inside=inside)
    monkeypatch.setattr("sheepop.train.loop.catch_interrupts", lambda: nullcontext(patched()))
    while True:
        try:
            trainer.run()
            break
        except Interrupted:
            places += 1
        assert trainer.checkpointer.run.pointer("latest") == trainer.state.step
        resumed = make_trainer("run", resume=True)
        assert resumed.state.step == trainer.state.step
        trainer = resumed
    assert places == 18
    assert_same_run(unbroken, trainer)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_data_that_vanishes_ends_the_run_with_all_steps_before_saved(
    make_trainer: MakeTrainer, unbroken: Trainer, corpus: Corpus, tmp_path: Path, prefetch: int
) -> None:
    first = make_trainer("vanished", prefetch=prefetch, checkpoint_interval=100, eval_interval=100)
    moved = Path(shutil.copytree(corpus.directory, tmp_path / "corpus"))
    (source,) = first.source.schedule.sources
    batches = PackedBatches(Corpus.open(moved).train, max_length=32, pad_id=corpus.tokenizer().pad_id)
    schedule = replace(first.source.schedule, sources=[replace(source, batches=batches)])
    first.source = replace(first.source, schedule=schedule)

    def vanish(step: int) -> list[dict[str, Any]]:
        if step == 6:
            (moved / "tokens" / "train-00000.bin").write_bytes(b"")
        return []

    first.sample = vanish
    with pytest.raises(DataError, match=r"train-00000\.bin was cut short after it was opened"):
        first.run()
    reached = first.state.step
    assert 6 <= reached <= 6 + prefetch
    assert first.checkpointer.run.pointer("latest") == reached
    second = make_trainer("vanished", resume=True)
    second.run()
    for name, tensor in weights(unbroken).items():
        assert torch.equal(tensor, second.model.get_parameter(name)), name


@pytest.mark.parametrize("ema_decay", [None, 0.8])
def test_held_out_text_that_vanishes_is_scored_when_it_is_there_again(
    make_trainer: MakeTrainer, corpus: Corpus, tmp_path: Path, ema_decay: float | None
) -> None:
    unbroken = make_trainer("unbroken", ema_decay=ema_decay)
    unbroken.run()
    first = make_trainer("vanished", ema_decay=ema_decay)
    moved, tokenizer = Path(shutil.copytree(corpus.directory, tmp_path / "corpus")), corpus.tokenizer()
    batches = PackedBatches(Corpus.open(moved).validation, max_length=32, pad_id=tokenizer.pad_id)
    first.validate = lambda: validate(
        first.model, batches, tokenizer.byte_lengths(), batch_size=8, precision="fp32", device="cpu"
    )
    sample = first.sample

    def vanish(step: int) -> list[dict[str, Any]]:
        if step == 6:
            (moved / "tokens" / "val-00000.bin").unlink()
        return sample(step)

    first.sample = vanish
    with pytest.raises(DataError, match=r"val-00000\.bin has disappeared since it was opened"):
        first.run()
    assert first.state.step == first.checkpointer.run.pointer("latest") == 8
    second = make_trainer("vanished", resume=True, ema_decay=ema_decay)
    second.run()
    assert_same_run(unbroken, second)


def test_lines_written_after_the_last_checkpoint_are_not_repeated(make_trainer: MakeTrainer, unbroken: Trainer) -> None:
    first = make_trainer("killed")
    first.checkpointer.save = fail_at(first, 9)
    with pytest.raises(Killed):
        first.run()
    assert timeless(first.checkpointer.run.metrics_file)[-1]["step"] == 9
    second = make_trainer("killed", resume=True)
    assert second.state.step == 8  # step 8 had the best validation and was saved
    second.run()
    assert_same_run(unbroken, second)


def fail_at(trainer: Trainer, step: int) -> Callable[[Any], None]:
    save = trainer.checkpointer.save

    def failing(state: Any, **callbacks: Any) -> None:
        if state.step == step:
            raise Killed
        save(state, **callbacks)

    return failing


def test_a_damaged_checkpoint_is_passed_over_and_the_run_is_still_the_same(
    make_trainer: MakeTrainer, unbroken: Trainer
) -> None:
    first = make_trainer("damaged")
    first.checkpointer.save = fail_at(first, 9)
    with pytest.raises(Killed):
        first.run()
    file = first.checkpointer.run.checkpoint(8) / "state" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    second = make_trainer("damaged", resume=True)
    assert second.state.step == 6
    second.checkpointer.run.mark_best(second.state.best_step)
    second.run()
    assert_same_run(unbroken, second)


@pytest.mark.parametrize(("before", "after"), [(None, 0.8), (0.8, None)])
def test_a_checkpoint_with_and_one_without_averages_are_not_mistaken(
    make_trainer: MakeTrainer, before: float | None, after: float | None
) -> None:
    make_trainer("run", ema_decay=before).run()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        make_trainer("run", resume=True, ema_decay=after)
