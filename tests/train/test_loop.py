"""The life of a run: what it computes, what it writes when, and that stopping anywhere changes nothing."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.core.errors import Interrupted
from sheepop.data import Corpus, SampleOrder
from sheepop.train import Trainer, TrainingError
from sheepop.train.interrupt import InterruptFlag
from sheepop.train.metrics import read_json_lines
from sheepop.train.objective import TensorBatch

TIMING = ("seconds", "tokens_per_second", "mfu")
MakeTrainer = Callable[..., Trainer]


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in TIMING} for row in read_json_lines(path)[0]]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_run(first: Trainer, second: Trainer) -> None:
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, second.model.get_parameter(name)), name
    one, two = first.checkpointer.run, second.checkpointer.run
    assert timeless(one.metrics_file) == timeless(two.metrics_file)
    assert one.samples_file.read_bytes() == two.samples_file.read_bytes()
    assert one.pointer("best") == two.pointer("best")


def test_the_loss_falls_and_the_best_checkpoint_is_the_lowest_validation(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", max_steps=24, warmup_steps=2)
    trainer.run()
    rows = timeless(trainer.checkpointer.run.metrics_file)
    train = [row["loss"] for row in rows if row["split"] == "train"]
    scores = {row["step"]: row["loss"] for row in rows if row["split"] == "validation"}
    assert len(train) == 24
    assert train[-1] < train[0] - 1.0
    assert trainer.checkpointer.run.pointer("best") == min(scores, key=lambda step: scores[step])


def test_rows_checkpoints_and_samples_come_when_they_are_due(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", log_interval=5, keep_checkpoints=1)
    trainer.run()
    run = trainer.checkpointer.run
    rows = timeless(run.metrics_file)
    assert [row["step"] for row in rows if row["split"] == "train"] == [5, 10, 12]
    assert [row["step"] for row in rows if row["split"] == "validation"] == [4, 8, 12]
    assert [row["step"] for row in read_json_lines(run.samples_file)[0]] == [3, 6, 9, 12]
    milestones = {2, 3, 6}  # 10, 25 and 50 percent of 12, rounded up
    assert set(run.steps()) == milestones | {12, run.pointer("best")}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_does_not_depend_on_how_it_is_cut(make_trainer: MakeTrainer, micro_batch_size: int) -> None:
    whole = make_trainer("whole", dropout=0.0, max_steps=3)
    cut = make_trainer("cut", dropout=0.0, max_steps=3, micro_batch_size=micro_batch_size)
    for trainer in (whole, cut):
        trainer.run()
    rows = [timeless(trainer.checkpointer.run.metrics_file) for trainer in (whole, cut)]
    for one, other in zip(*rows, strict=True):
        assert one.pop("split") == other.pop("split")
        assert other == pytest.approx(one, rel=1e-4)


def test_every_token_of_a_step_weighs_the_same(make_trainer: MakeTrainer) -> None:
    """Rows with few labels must not weigh more because they are in a micro-batch of their own."""
    trainer = make_trainer("run", dropout=0.0, micro_batch_size=1, max_steps=2, warmup_steps=0)
    samples = [trainer.batches.batch(np.array([index])) for index in trainer.order.indices(0, 8)]
    counts = [int((sample.labels != -100).sum()) for sample in samples]
    assert len(set(counts)) > 1
    losses = []
    with torch.no_grad():
        for sample in samples:
            batch = TensorBatch.from_numpy(sample, "cpu")
            logits = trainer.model.eval()(
                batch.input_ids, positions=batch.positions, document_ids=batch.document_ids
            ).double()
            chosen = batch.labels[batch.labels != -100]
            losses += (-torch.log_softmax(logits[batch.labels != -100], -1)[torch.arange(len(chosen)), chosen]).tolist()
    loss, _, _ = trainer._step(0)
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_from_any_checkpoint_a_run_is_the_same_bit_for_bit(make_trainer: MakeTrainer, optimizer: str) -> None:
    unbroken = make_trainer("unbroken", optimizer=optimizer)
    unbroken.run()
    for step in (1, 5, 8):
        first = make_trainer(f"stopped-{step}", optimizer=optimizer)
        first.order = InterruptedOrder(first.order, step)
        with pytest.raises(Interrupted, match=f"after step {step} of 12"):
            first.run()
        second = make_trainer(f"stopped-{step}", resume=True, optimizer=optimizer)
        assert second.state.step == step
        second.run()
        assert_same_run(unbroken, second)


@dataclass
class InterruptedOrder:
    """Sends this process SIGINT, as Ctrl-C does, in the middle of step number `step`."""

    order: SampleOrder
    step: int

    def indices(self, start: int, count: int) -> np.ndarray:
        if start == (self.step - 1) * count:
            os.kill(os.getpid(), signal.SIGINT)
        return self.order.indices(start, count)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(make_trainer: MakeTrainer, number: int, exit_code: int) -> None:
    trainer = make_trainer("run", sample_interval=5, checkpoint_interval=100)
    trainer.sample = lambda step: os.kill(os.getpid(), number) or []
    with pytest.raises(Interrupted, match="after step 5 of 12") as caught:
        trainer.run()
    assert caught.value.exit_code == exit_code
    assert trainer.checkpointer.run.pointer("latest") == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class LateFlag(InterruptFlag):
    """A flag that a signal sets between two looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def signal_number(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else signal.SIGINT


@pytest.mark.parametrize("looks", range(13))
def test_a_signal_at_any_moment_is_heard_and_its_step_is_saved(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    trainer = make_trainer("run", max_steps=12, checkpoint_interval=100, eval_interval=100)
    monkeypatch.setattr("sheepop.train.loop.catch_interrupts", lambda: nullcontext(LateFlag(looks)))
    with pytest.raises(Interrupted):
        trainer.run()
    assert trainer.checkpointer.run.pointer("latest") == trainer.state.step


def test_lines_written_after_the_last_checkpoint_are_not_repeated(make_trainer: MakeTrainer) -> None:
    unbroken = make_trainer("unbroken")
    unbroken.run()
    first = make_trainer("killed")
    first.checkpointer.save = fail_at(first, 9)
    with pytest.raises(RuntimeError, match="killed"):
        first.run()
    assert timeless(first.checkpointer.run.metrics_file)[-1]["step"] == 9
    second = make_trainer("killed", resume=True)
    assert second.state.step == 8  # step 8 had the best validation and was saved
    second.run()
    assert_same_run(unbroken, second)


def fail_at(trainer: Trainer, step: int) -> Callable[[Any], None]:
    save = trainer.checkpointer.save

    def failing(state: Any) -> None:
        if state.step == step:
            raise RuntimeError("killed")
        save(state)

    return failing


def test_a_damaged_checkpoint_is_passed_over_and_the_run_is_still_the_same(make_trainer: MakeTrainer) -> None:
    unbroken = make_trainer("unbroken")
    unbroken.run()
    first = make_trainer("damaged")
    first.checkpointer.save = fail_at(first, 9)
    with pytest.raises(RuntimeError, match="killed"):
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


def test_numbers_that_stop_being_numbers_end_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run")
    with torch.no_grad():
        trainer.model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="Step 1 gave loss nan"):
        trainer.run()
    assert trainer.checkpointer.run.steps() == []


def test_dropout_is_a_function_of_seed_and_step(make_trainer: MakeTrainer) -> None:
    first, second, other = (make_trainer(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    torch.rand(17)  # whatever was drawn before does not matter
    assert first._step(3) == second._step(3)
    assert first._step(4) != other._step(4)


def test_packed_documents_are_scored_as_if_each_stood_alone(make_trainer: MakeTrainer, corpus: Corpus) -> None:
    trainer = make_trainer("run")
    trainer.run()
    scores = trainer.validate()
    total, count, num_bytes = 0.0, 0, 0
    lengths = corpus.tokenizer().byte_lengths()
    with torch.no_grad():
        # Windows of 32 tokens start where packing cuts; a document begins anew at each cut.
        offsets, split = corpus.validation.offsets, corpus.validation
        cuts = sorted({*offsets.tolist(), *range(0, split.num_tokens, 32), split.num_tokens})
        for start, end in itertools.pairwise(cuts):
            document_end = offsets[np.searchsorted(offsets, start, side="right")]
            labels = split.tokens(start + 1, min(end + 1, document_end)).astype(np.int64)
            ids = split.tokens(start, start + len(labels)).astype(np.int64)
            if len(ids) == 0:
                continue
            logits = trainer.model.eval()(torch.from_numpy(ids)[None])[0].double()
            total += -torch.log_softmax(logits, -1)[torch.arange(len(labels)), torch.from_numpy(labels)].sum().item()
            count += len(labels)
            num_bytes += int(lengths[labels].sum())
    assert scores.tokens == count
    assert scores.loss == pytest.approx(total / count, rel=1e-5)
    assert scores.perplexity == pytest.approx(np.exp(total / count), rel=1e-5)
    assert scores.bits_per_byte == pytest.approx(total / np.log(2) / num_bytes, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_follows_the_course_of_float32(make_trainer: MakeTrainer, optimizer: str) -> None:
    courses = []
    for precision in ("fp32", "bf16"):
        trainer = make_trainer(precision, dropout=0.0, precision=precision, optimizer=optimizer)
        trainer.run()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        rows = timeless(trainer.checkpointer.run.metrics_file)
        courses.append([row["loss"] for row in rows if row["split"] == "train"])
    assert courses[0] != courses[1]
    assert courses[1] == pytest.approx(courses[0], rel=0.02)
