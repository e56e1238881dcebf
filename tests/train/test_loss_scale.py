"""The scale of the loss under float16: when it moves, that it is saved, and what a skipped step leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import TrainingError
from sheepop.core.json_lines import read_json_lines
from sheepop.train import Trainer, TrainingState
from sheepop.train.precision import LossScale, initial_loss_scale
from sheepop.train.step import Gradients

from .runs import Killed

MakeTrainer = Callable[..., Trainer]


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 10))
def test_the_scale_moves_as_torchs_scaler_does(finite_steps: list[bool], start: int) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2000)
    ours = LossScale(scale=2.0**40, good_steps=1990 + start)
    theirs._init_growth_tracker = 1990 + start
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for finite in finite_steps:
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        ours = ours.after(finite=finite)
        assert ours.scale == theirs.get_scale()
    assert ours.skipped_steps == finite_steps.count(False)


def test_below_the_floor_training_ends() -> None:
    scale = LossScale(scale=2.0)
    scale = scale.after(finite=False)
    assert (scale.scale, scale.skipped_steps) == (1.0, 1)
    with pytest.raises(TrainingError, match="even with loss scale 1, after 1 skipped steps"):
        scale.after(finite=False)


def test_only_float16_is_scaled() -> None:
    assert [initial_loss_scale(name) for name in ("fp32", "bf16", "fp8")] == [None] * 3
    assert initial_loss_scale("fp16") == LossScale(65536.0, 0, 0)


def test_an_overflow_skips_the_step_and_the_run_goes_on(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", precision="fp16", max_steps=6, sample_interval=1)
    # At this scale the gradients of float16 results are beyond 65504; a few steps bring it down.
    trainer.state = TrainingState(loss_scale=LossScale(scale=2.0**34))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}

    def look(step: int) -> list[dict[str, object]]:
        if step == 1:
            assert trainer.state.loss_scale == LossScale(2.0**33, 0, 1)
            assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
            assert not any(optimizer.state for optimizer in trainer.runner.optimizers)
            looked.append(step)
        return []

    looked: list[int] = []
    trainer.sample = look
    trainer.run()
    assert looked == [1]
    rows = [row for row in read_json_lines(trainer.checkpointer.run.metrics_file)[0] if row["split"] == "train"]
    scales = [(row["loss_scale"], row["skipped_steps"]) for row in rows]
    assert scales[0] == (2.0**33, 1)
    assert all(scale == 2.0 ** (34 - skipped) for scale, skipped in scales)


def test_a_scale_at_its_floor_ends_the_run_with_every_step_saved(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", precision="fp16", checkpoint_interval=100, eval_interval=100, max_steps=100)
    norm = next(parameter for name, parameter in trainer.model.named_parameters() if "norm" in name)

    def overflow(step: int) -> list[dict[str, object]]:
        trainer.state = trainer.state.after(loss_scale=LossScale(1.0))
        norm.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return []

    trainer.sample = overflow  # after step 3
    with pytest.raises(TrainingError, match="Gradients overflow float16 even with loss scale 1"):
        trainer.run()
    assert trainer.checkpointer.run.pointer("latest") == 3
    saved = make_trainer("run", resume=True, precision="fp16", max_steps=100)
    assert saved.state == trainer.state
    for one, other in zip(saved.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_scaled_gradients_give_the_step_that_unscaled_ones_give(make_trainer: MakeTrainer) -> None:
    """In float32 nothing overflows or underflows here, and a power of two changes no bit."""
    plain, scaled = make_trainer("plain", max_steps=3), make_trainer("scaled", max_steps=3)
    scaled.state = TrainingState(loss_scale=LossScale(scale=2.0**10))
    plain.run()
    scaled.run()
    for (name, one), other in zip(plain.model.named_parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_resumed_run_goes_on_with_the_same_scale(make_trainer: MakeTrainer) -> None:
    unbroken = make_trainer("unbroken", precision="fp16", max_steps=12)
    unbroken.state = TrainingState(loss_scale=LossScale(scale=2.0**30))
    unbroken.run()
    first = make_trainer("stopped", precision="fp16", max_steps=12)
    first.state = TrainingState(loss_scale=LossScale(scale=2.0**30))
    run_step = first.runner.gradients

    def stop_at_seven(*arguments: Any, **settings: Any) -> Gradients:
        if first.state.step == 7:
            raise Killed
        return run_step(*arguments, **settings)

    first.runner.gradients = stop_at_seven  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.run()
    second = make_trainer("stopped", resume=True, precision="fp16", max_steps=12)
    assert second.state.step == 6
    second.run()
    assert second.state.loss_scale == unbroken.state.loss_scale
    for (name, one), other in zip(unbroken.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other), name
