"""The life of a run: what it computes, what it writes when, and that stopping anywhere changes nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from sheepop.checkpoint.model_directory import load_weights, read_weights
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.errors import CheckpointError, DataError, Interrupted
from sheepop.data import Batch, Corpus, PackedBatches, StepPlan, batch_hash
from sheepop.train import Scores, Trainer, validate
from sheepop.train.interrupt import Interruption
from sheepop.train.metrics import read_json_lines
from sheepop.train.objective import TensorBatch
from sheepop.train.optimizer_settings import OptimizerName
from sheepop.train.step import PreparedStep

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


WARM_UPS: dict[str, Any] = {
    "batch_size_warmup": ((2, 3), (4, 5)),
    "sequence_length_warmup": ((1, 8), (5, 16)),
    "log_batch_hash": True,
}


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
    assert hashes[0] == hashes[1] == [batch_hash(whole.plan.batch(step)) for step in range(7)]
    assert len(set(hashes[0])) == 7
    for one, other in zip(*rows, strict=True):
        assert one.pop("split") == other.pop("split")
        assert other == pytest.approx(one, rel=1e-4)


def test_with_warm_ups_a_resumed_run_is_the_same_bit_for_bit(make_trainer: MakeTrainer) -> None:
    unbroken = make_trainer("unbroken", **WARM_UPS)
    unbroken.run()
    for step in (1, 3, 5):
        first = make_trainer(f"stopped-{step}", prefetch=0, **WARM_UPS)
        first.plan = InterruptedPlan(first.plan, step + 1)  # type: ignore[assignment]
        with pytest.raises(Interrupted, match=f"after step {step} of 12"):
            first.run()
        second = make_trainer(f"stopped-{step}", resume=True, **WARM_UPS)
        second.run()
        assert_same_run(unbroken, second)


def test_a_micro_batch_holds_as_many_tokens_when_rows_are_shorter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", micro_batch_size=4, batch_size_warmup=((2, 6),), sequence_length_warmup=((1, 8),))
    shapes = [
        [tuple(part.inputs["input_ids"].shape) for part in trainer._prepare(step).micro_batches] for step in (0, 1, 2)
    ]
    assert shapes == [[(16, 8), (8, 8)], [(4, 32), (2, 32)], [(4, 32), (4, 32)]]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_data_that_vanishes_ends_the_run_with_all_steps_before_saved(
    make_trainer: MakeTrainer, corpus: Corpus, tmp_path: Path, prefetch: int
) -> None:
    unbroken = make_trainer("unbroken")
    unbroken.run()
    first = make_trainer("vanished", prefetch=prefetch, checkpoint_interval=100, eval_interval=100)
    moved = Path(shutil.copytree(corpus.directory, tmp_path / "corpus"))
    (source,) = first.plan.sources
    batches = PackedBatches(Corpus.open(moved).train, max_length=32, pad_id=corpus.tokenizer().pad_id)
    first.plan = replace(first.plan, sources=[replace(source, batches=batches)])

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
    with pytest.raises(DataError, match=r"val-00000\.bin was there when it was opened, and is gone now"):
        first.run()
    assert first.state.step == first.checkpointer.run.pointer("latest") == 8
    second = make_trainer("vanished", resume=True, ema_decay=ema_decay)
    second.run()
    assert_same_run(unbroken, second)


def test_every_token_of_a_step_weighs_the_same(make_trainer: MakeTrainer) -> None:
    """Rows with few labels must not weigh more because they are in a micro-batch of their own."""
    trainer = make_trainer("run", dropout=0.0, micro_batch_size=1, max_steps=2, warmup_steps=0)
    samples = [trainer.plan.batch(0).rows(slice(row, row + 1)) for row in range(8)]
    counts = [int((sample.labels != -100).sum()) for sample in samples]
    assert len(set(counts)) > 1
    losses = []
    with torch.no_grad():
        for sample in samples:
            batch = TensorBatch.from_numpy(sample, "cpu")
            logits = trainer.model.eval()(**batch.inputs).double()
            chosen = batch.labels[batch.labels != -100]
            losses += (-torch.log_softmax(logits[batch.labels != -100], -1)[torch.arange(len(chosen)), chosen]).tolist()
    prepared = trainer._prepare(0)
    (_, loss), _ = numbers_of(trainer, prepared)
    assert prepared.num_tokens == sum(counts)
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def settings_of(optimizer: str, ema_decay: float | None = None) -> dict[str, Any]:
    schedule = "constant" if optimizer == "schedule_free_adamw" else "cosine"
    return {"optimizer": optimizer, "schedule": schedule, "ema_decay": ema_decay}


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
        first.plan = InterruptedPlan(first.plan, step + 1)  # type: ignore[assignment]
        with pytest.raises(Interrupted, match=f"after step {step} of 12"):
            first.run()
        second = make_trainer(f"stopped-{step}", resume=True, **settings)
        assert second.state.step == step
        second.run()
        assert_same_run(unbroken, second)
        for file in (first.checkpointer.run.checkpoint(12)).rglob("*.safetensors"):
            again = unbroken.checkpointer.run.checkpoint(12) / file.relative_to(first.checkpointer.run.checkpoint(12))
            assert file.read_bytes() == again.read_bytes(), file


@dataclass
class InterruptedPlan:
    """Sends this process SIGINT, as Ctrl-C does, in the middle of step number `step`."""

    plan: StepPlan
    step: int

    def pieces(self, step: int) -> int:
        return self.plan.pieces(step)

    def batch(self, step: int) -> Batch:
        if step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return self.plan.batch(step)


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
@pytest.mark.parametrize("place", range(1, 20))
def test_left_anywhere_a_run_goes_on_to_the_same_bits(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, place: int, inside: bool
) -> None:
    unbroken = make_trainer("unbroken")
    unbroken.run()
    trainer = make_trainer("run")
    with monkeypatch.context() as patch:
        patch.setattr("sheepop.train.loop.catch_interrupts", lambda: nullcontext(InterruptedAt(place, inside=inside)))
        with pytest.raises(Interrupted):
            trainer.run()
    assert trainer.checkpointer.run.pointer("latest") == trainer.state.step
    resumed = make_trainer("run", resume=True)
    assert resumed.state.step == trainer.state.step
    resumed.run()
    assert_same_run(unbroken, resumed)


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

    def failing(state: Any, **callbacks: Any) -> None:
        if state.step == step:
            raise RuntimeError("killed")
        save(state, **callbacks)

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


def numbers_of(trainer: Trainer, prepared: PreparedStep) -> tuple[tuple[float, float], float]:
    losses, norm = trainer._gradients(prepared)
    return losses.means(), norm


def test_dropout_is_a_function_of_seed_and_step(make_trainer: MakeTrainer) -> None:
    first, second, other = (make_trainer(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    prepared = first._prepare(0)
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
    (optimizer,) = trainer.optimizers
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
    (row,) = (row for row in timeless(trainer.metrics.path) if row["split"] == "train")
    assert row["grad_norm"] > 0.125
    expected = row["grad_norm"] if max_grad_norm is None else min(max_grad_norm, row["grad_norm"])
    assert moved**0.5 == pytest.approx(0.01 * expected, rel=1e-3)


def test_the_supervised_tokens_of_all_steps_are_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", max_steps=5, **WARM_UPS)
    trainer.run()
    counts = [np.count_nonzero(trainer.plan.batch(step).labels != -100) for step in range(5)]
    rows = [row for row in timeless(trainer.metrics.path) if row["split"] == "train"]
    assert [row["tokens"] for row in rows] == list(itertools.accumulate(counts))


def test_of_equal_validations_the_first_is_the_best(make_trainer: MakeTrainer) -> None:
    losses = [5.0, 3.0, 4.0, 3.0, 3.0, 4.0]
    trainer = make_trainer("run", eval_interval=2)
    trainer.validate = lambda: Scores(losses[trainer.state.step // 2 - 1], 1.0, 0.0, 1.0, tokens=1, bytes=1)
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

    (optimizer,) = trainer.optimizers
    optimizer.register_step_post_hook(follow)
    trainer.run()
    assert next(steps) == 4
    with trainer.evaluation.applied():
        for name, weight in weights(trainer).items():
            torch.testing.assert_close(weight, average[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_micro_batches_of_equal_rows_differ_by_their_dropout_alone(make_trainer: MakeTrainer, dropout: float) -> None:
    trainer = make_trainer("run", dropout=dropout, micro_batch_size=4)
    prepared = trainer._prepare(0)
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
    ("optimizer", "ema_decay"),
    [
        (optimizer, ema_decay)
        for optimizer in get_args(OptimizerName)
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
    first.plan = InterruptedPlan(first.plan, 4)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        first.run()
    second = make_trainer("stopped", resume=True, **settings)
    assert second.state == first.state
    assert second.state.step == 3
    second.run()
    one, other = (trainer.checkpointer.run.checkpoint(6) for trainer in (unbroken, second))
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert len(files) == 2 + second.evaluation.differ
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


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


@pytest.mark.parametrize(("before", "after"), [(None, 0.8), (0.8, None)])
def test_a_checkpoint_with_and_one_without_averages_are_not_mistaken(
    make_trainer: MakeTrainer, before: float | None, after: float | None
) -> None:
    make_trainer("run", ema_decay=before).run()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        make_trainer("run", resume=True, ema_decay=after)


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_bfloat16_follows_the_course_of_float32(make_trainer: MakeTrainer, optimizer: str) -> None:
    courses = []
    for precision in ("fp32", "bf16"):
        trainer = make_trainer(precision, dropout=0.0, precision=precision, **settings_of(optimizer))
        trainer.run()
        kept = [value for o in trainer.optimizers for state in o.state.values() for value in state.values()]
        dtypes = {value.dtype for value in [*trainer.model.parameters(), *kept] if torch.is_tensor(value)}
        assert dtypes == {torch.float32}
        rows = timeless(trainer.checkpointer.run.metrics_file)
        courses.append([row["loss"] for row in rows if row["split"] == "train"])
    assert courses[0] != courses[1]
    assert courses[1] == pytest.approx(courses[0], rel=0.02)
