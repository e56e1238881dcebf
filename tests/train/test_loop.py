"""The life of a run: what it computes, and what it writes when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.checkpoint.model_directory import load_weights, read_weights
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.json_lines import read_json_lines
from sheepop.core.random import seed_torch
from sheepop.data import Corpus, batch_hash
from sheepop.train import TokenScores, Trainer
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

from .runs import WARM_UPS, settings_of, timeless, weights

MakeTrainer = Callable[..., Trainer]


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


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("settings", [{"log_batch_hash": True}, WARM_UPS], ids=["plain", "warm-ups"])
def test_another_micro_batch_size_sees_the_same_global_batches(
    make_trainer: MakeTrainer, micro_batch_size: int, settings: dict[str, Any]
) -> None:
    whole = make_trainer("whole", dropout=0.0, max_steps=7, **settings)
    cut = make_trainer("cut", dropout=0.0, max_steps=7, micro_batch_size=micro_batch_size, prefetch=0, **settings)
    for trainer in (whole, cut):
        trainer.run()
    rows = [timeless(trainer.checkpointer.run.metrics_file) for trainer in (whole, cut)]
    hashes = [[row.pop("batch_hash") for row in run if row["split"] == "train"] for run in rows]
    assert hashes[0] == hashes[1] == [batch_hash(whole.source.schedule.batch(step)) for step in range(7)]
    assert len(set(hashes[0])) == 7
    for one, other in zip(*rows, strict=True):
        assert one.pop("split") == other.pop("split")
        assert other == pytest.approx(one, rel=1e-4)


def test_a_micro_batch_holds_as_many_tokens_when_rows_are_shorter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", micro_batch_size=4, batch_size_warmup=((2, 6),), sequence_length_warmup=((1, 8),))
    shapes = [
        [tuple(part.inputs["input_ids"].shape) for part in trainer.source.prepare(step).micro_batches]
        for step in (0, 1, 2)
    ]
    assert shapes == [[(16, 8), (8, 8)], [(4, 32), (2, 32)], [(4, 32), (4, 32)]]


def test_every_token_of_a_step_weighs_the_same(make_trainer: MakeTrainer) -> None:
    """Rows with few labels must not weigh more because they are in a micro-batch of their own."""
    trainer = make_trainer("run", dropout=0.0, micro_batch_size=1, max_steps=2, warmup_steps=0)
    samples = [trainer.source.schedule.batch(0).rows(slice(row, row + 1)) for row in range(8)]
    counts = [int((sample.labels != -100).sum()) for sample in samples]
    assert len(set(counts)) > 1
    losses = []
    with torch.no_grad():
        for sample in samples:
            batch = TensorBatch.from_numpy(sample, "cpu")
            logits = trainer.model.eval()(**batch.inputs).double()
            chosen = batch.labels[batch.labels != -100]
            losses += (-torch.log_softmax(logits[batch.labels != -100], -1)[torch.arange(len(chosen)), chosen]).tolist()
    prepared = trainer.source.prepare(0)
    (_, loss), _ = numbers_of(trainer, prepared)
    assert prepared.num_tokens == sum(counts)
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def numbers_of(trainer: Trainer, prepared: PreparedStep) -> tuple[tuple[float, float], float]:
    step = trainer.state.step
    found = trainer.runner.gradients(
        prepared, before_forward=lambda number: seed_torch(trainer.seed, "dropout", step, number)
    )
    return found.losses.means(), found.norm.item()


def test_dropout_is_a_function_of_seed_and_step(make_trainer: MakeTrainer) -> None:
    first, second, other = (make_trainer(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    prepared = first.source.prepare(0)
    one, another = (trainer.state.after(step=step) for trainer, step in ((first, 3), (first, 4)))
    first.state = second.state = other.state = one
    torch.rand(17)  # whatever was drawn before does not matter
    assert numbers_of(first, prepared) == numbers_of(second, prepared)
    second.state = another
    assert numbers_of(first, prepared) != numbers_of(second, prepared)
    assert numbers_of(first, prepared) != numbers_of(other, prepared)


def test_every_step_takes_the_rate_of_its_number_and_it_is_logged(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", max_steps=6, warmup_steps=2, schedule="linear", learning_rate=0.01)
    taken: list[float] = []
    (optimizer,) = trainer.runner.optimizers
    optimizer.register_step_pre_hook(lambda *_: taken.append(optimizer.param_groups[0]["lr"]))
    trainer.run()
    assert taken == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
    rows = timeless(trainer.checkpointer.run.metrics_file)
    assert [row["learning_rate"] for row in rows if row["split"] == "train"] == taken


@pytest.mark.parametrize("max_grad_norm", [None, 0.125, 100.0])
def test_a_step_is_as_long_as_its_clipped_gradient_and_the_norm_before_is_logged(
    make_trainer: MakeTrainer, max_grad_norm: float | None
) -> None:
    """Plain gradient descent moves the weights by the rate times the gradient."""
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant"}
    trainer = make_trainer("run", max_steps=1, max_grad_norm=max_grad_norm, **settings)
    before = weights(trainer)
    trainer.run()
    moved = sum((weight - before[name]).double().square().sum().item() for name, weight in weights(trainer).items())
    (row,) = (row for row in timeless(trainer.journal.metrics.path) if row["split"] == "train")
    assert row["grad_norm"] > 0.125
    expected = row["grad_norm"] if max_grad_norm is None else min(max_grad_norm, row["grad_norm"])
    assert moved**0.5 == pytest.approx(0.01 * expected, rel=1e-3)


def test_the_supervised_tokens_of_all_steps_are_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", max_steps=5, **WARM_UPS)
    trainer.run()
    counts = [np.count_nonzero(trainer.source.schedule.batch(step).labels != -100) for step in range(5)]
    rows = [row for row in timeless(trainer.journal.metrics.path) if row["split"] == "train"]
    assert [row["tokens"] for row in rows] == list(itertools.accumulate(counts))


def test_of_equal_validations_the_first_is_the_best(make_trainer: MakeTrainer) -> None:
    losses = [5.0, 3.0, 4.0, 3.0, 3.0, 4.0]
    trainer = make_trainer("run", eval_interval=2)
    trainer.validate = lambda: TokenScores(losses[trainer.state.step // 2 - 1], 1.0, 0.0, 1.0, tokens=1, bytes=1)
    state = trainer.run()
    assert (state.best_loss, state.best_step) == (3.0, 4)
    assert trainer.checkpointer.run.pointer("best") == 4


def test_the_average_of_a_run_is_that_of_a_loop_of_its_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", max_steps=3, ema_decay=0.999)
    average, steps = weights(trainer), itertools.count(1)

    def follow(*_: Any) -> None:
        t = next(steps)
        d = (1 + t) / (10 + t)
        for name, weight in weights(trainer).items():
            average[name] = d * average[name] + (1 - d) * weight

    (optimizer,) = trainer.runner.optimizers
    optimizer.register_step_post_hook(follow)
    trainer.run()
    assert next(steps) == 4
    with trainer.runner.evaluation.applied():
        for name, weight in weights(trainer).items():
            torch.testing.assert_close(weight, average[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_micro_batches_of_equal_rows_differ_by_their_dropout_alone(make_trainer: MakeTrainer, dropout: float) -> None:
    trainer = make_trainer("run", dropout=dropout, micro_batch_size=4)
    prepared = trainer.source.prepare(0)
    twice = replace(prepared, micro_batches=[prepared.micro_batches[0]] * 2)
    once = replace(prepared, micro_batches=[prepared.micro_batches[0]])
    (of_both, _), (of_one, _) = (numbers_of(trainer, cut)[0] for cut in (twice, once))
    assert (of_both == 2 * of_one) == (dropout == 0)


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


@pytest.mark.parametrize(
    "settings", [settings_of("adamw", 0.8), settings_of("schedule_free_adamw")], ids=["average", "schedule-free"]
)
def test_what_is_validated_is_what_is_saved_and_not_what_is_trained(
    make_trainer: MakeTrainer, settings: dict[str, Any]
) -> None:
    trainer = make_trainer("run", **settings)
    seen: list[dict[str, torch.Tensor]] = []
    trainer.sample = lambda step: seen.append(weights(trainer)) or []
    trainer.run()
    run = trainer.checkpointer.run
    rows = [row for row in timeless(run.metrics_file) if row["split"] == "validation"]
    trained = weights(trainer)
    load_weights(trainer.model, read_all_weights(run.checkpoint(12)), run.path)
    saved = weights(trainer)
    assert not torch.equal(saved["embedding.weight"], trained["embedding.weight"])
    assert all(torch.equal(seen[-1][name], saved[name]) for name in saved)
    assert trainer.validate().loss == rows[-1]["loss"]
    load_weights(trainer.model, read_weights(run.checkpoint(12) / "state" / "weights.safetensors"), run.path)
    assert all(torch.equal(weights(trainer)[name], trained[name]) for name in trained)
    assert trainer.validate().loss != rows[-1]["loss"]


def test_averaging_changes_nothing_about_the_training(make_trainer: MakeTrainer) -> None:
    plain, averaged = make_trainer("plain"), make_trainer("averaged", ema_decay=0.8)
    for trainer in (plain, averaged):
        trainer.run()
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, averaged.model.get_parameter(name)), name


@pytest.mark.parametrize("optimizer", list(OPTIMIZER_NAMES))
def test_bfloat16_follows_the_course_of_float32(make_trainer: MakeTrainer, optimizer: str) -> None:
    courses = []
    for precision in ("fp32", "bf16"):
        trainer = make_trainer(precision, dropout=0.0, precision=precision, **settings_of(optimizer))
        trainer.run()
        kept = [value for o in trainer.runner.optimizers for state in o.state.values() for value in state.values()]
        dtypes = {value.dtype for value in [*trainer.model.parameters(), *kept] if torch.is_tensor(value)}
        assert dtypes == {torch.float32}
        rows = timeless(trainer.checkpointer.run.metrics_file)
        courses.append([row["loss"] for row in rows if row["split"] == "train"])
    assert courses[0] != courses[1]
    assert courses[1] == pytest.approx(courses[0], rel=0.02)
