"""A micro-batch computed twice: equal bits are silent, one flipped bit is found and its place named."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sheepop.core.errors import Interrupted
from sheepop.core.json_lines import read_json_lines
from sheepop.model import LossSums
from sheepop.train import Trainer
from sheepop.train.objective import NextToken
from sheepop.train.placement import Network
from sheepop.train.step import Gradients, Recomputation
from sheepop.train.tensor_batch import TensorBatch

from .runs import Killed

MakeTrainer = Callable[..., Trainer]


def layer_with(gradient: Tensor) -> nn.Linear:
    layer = nn.Linear(gradient.shape[1], gradient.shape[0], bias=False)
    layer.weight.grad = gradient
    return layer


def sums(loss: float) -> LossSums:
    return LossSums(torch.tensor(loss, dtype=torch.float64), torch.zeros(()))


def flipped(gradient: Tensor, row: int, column: int, bit: int) -> Tensor:
    bits = gradient.numpy().copy().view(np.uint32)
    bits[row, column] ^= np.uint32(1 << bit)
    return torch.from_numpy(bits.view(np.float32))


def test_one_flipped_bit_is_found_and_named() -> None:
    gradient = torch.arange(6.0).reshape(2, 3) + 1
    layer = layer_with(gradient)
    recomputation = Recomputation(layer)
    recomputation.take([sums(1.5)])
    assert layer.weight.grad is None
    layer.weight.grad = flipped(gradient, 1, 2, 0)
    recomputation.compare([sums(1.5)])
    (line,) = recomputation.differences
    assert "weight: 1 of 6 values differ" in line
    assert "[1, 2], 6.0, then 6.00000047" in line


def test_bits_are_compared_and_not_numbers() -> None:
    layer = layer_with(torch.tensor([[0.0, float("nan"), 1.0]]))
    same = Recomputation(layer)
    same.take([sums(float("nan"))])
    layer.weight.grad = torch.tensor([[0.0, float("nan"), 1.0]])
    same.compare([sums(float("nan"))])
    assert same.differences == []
    other = Recomputation(layer)
    other.take([sums(0.0)])
    layer.weight.grad = torch.tensor([[-0.0, float("nan"), 1.0]])
    other.compare([sums(-0.0)])
    assert [line.split(":")[0] for line in other.differences] == ["loss", "weight"]


def test_a_gradient_that_only_one_of_the_computations_gave_is_named() -> None:
    layer = nn.Linear(3, 2)
    recomputation = Recomputation(layer)
    layer.weight.grad = torch.zeros(2, 3)
    recomputation.take([sums(0.0)])
    layer.bias.grad = torch.zeros(2)
    recomputation.compare([sums(0.0)])
    reason = "only one of the computations gave a gradient"
    assert recomputation.differences == [f"weight: {reason}", f"bias: {reason}"]


def test_the_largest_difference_is_said() -> None:
    layer = layer_with(torch.tensor([[1.0, 2.0, 3.0]]))
    recomputation = Recomputation(layer)
    recomputation.take([sums(0.0)])
    layer.weight.grad = torch.tensor([[1.0, 2.25, 1.0]])
    recomputation.compare([sums(0.0)])
    (line,) = recomputation.differences
    assert "2 of 3 values differ, by at most 2; the first is at [0, 1], 2.0, then 2.25" in line


CALLS = itertools.count(1)


class Unsteady(NextToken):
    """Gives another gradient each time, as a faulty processor might."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        sums = super().loss_sums(network, batch)
        return LossSums(sums.objective * (1 + 1e-6 * next(CALLS)), sums.cross_entropy)


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_verifying_changes_nothing_about_a_run(make_trainer: MakeTrainer, micro_batch_size: int) -> None:
    plain = make_trainer("plain", micro_batch_size=micro_batch_size)
    verified = make_trainer("verified", micro_batch_size=micro_batch_size, verify_interval=3)
    plain.run()
    verified.run()
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, verified.model.get_parameter(name)), name
    assert "verification" not in {row["split"] for row in read_json_lines(verified.journal.metrics.path)[0]}


def test_what_is_not_repeatable_is_reported_when_it_is_looked_for(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", verify_interval=4, eval_interval=12)
    trainer.runner.objective = Unsteady()
    trainer.run()
    reports = [row for row in read_json_lines(trainer.journal.metrics.path)[0] if row["split"] == "verification"]
    assert [row["step"] for row in reports] == [3, 7, 11]  # in the steps 4, 8 and 12
    names = {name for name, _ in trainer.model.named_parameters()}
    assert {line.split(":")[0] for line in reports[0]["differences"]} <= names | {"loss"}


def test_a_step_that_is_left_after_it_was_verified_is_reported_once(make_trainer: MakeTrainer) -> None:
    def trainer_of(name: str, *, resume: bool = False) -> Trainer:
        trainer = make_trainer(name, resume=resume, verify_interval=4)
        trainer.runner.objective = Unsteady()
        return trainer

    trainer = trainer_of("run")
    gradients = trainer.runner.gradients

    def left(*arguments: Any, **settings: Any) -> Gradients:
        found = gradients(*arguments, **settings)
        if trainer.state.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    trainer.runner.gradients = left
    with pytest.raises(Interrupted):
        trainer.run()
    resumed = trainer_of("run", resume=True)
    resumed.run()
    rows = read_json_lines(resumed.journal.metrics.path)[0]
    assert [row["step"] for row in rows if row["split"] == "verification"] == [3, 7, 11]


class Faulty:
    """Of two computations of a micro-batch finds what a lasting fault of the machine makes of them."""

    differences: ClassVar[list[str]] = ["weight: 1 of 6 values differ"]

    def __init__(self, model: nn.Module) -> None:
        pass

    def take(self, loss: float) -> None:
        pass

    def compare(self, loss: float) -> None:
        pass


class Mended(Faulty):
    """Finds nothing."""

    differences: ClassVar[list[str]] = []


@pytest.mark.parametrize("later", [Faulty, Mended])
def test_a_report_that_no_checkpoint_speaks_of_outlives_a_kill_and_stands_once(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, later: type[Faulty]
) -> None:
    monkeypatch.setattr("sheepop.train.step.Recomputation", Faulty)
    killed = make_trainer("run", verify_interval=4, eval_interval=12)
    gradients = killed.runner.gradients

    def dies(*arguments: Any, **settings: Any) -> Gradients:
        if killed.state.step == 8:
            raise Killed
        return gradients(*arguments, **settings)

    monkeypatch.setattr(killed.runner, "gradients", dies)
    with pytest.raises(Killed):
        killed.run()
    with killed.journal.metrics.path.open("ab") as file:
        file.write(b'{"step": 8, "spl')  # as a kill leaves it
    monkeypatch.setattr("sheepop.train.step.Recomputation", later)
    resumed = make_trainer("run", resume=True, verify_interval=4, eval_interval=12)
    assert resumed.state.step == 6
    resumed.run()
    rows, num_unreadable = read_json_lines(resumed.journal.metrics.path)
    expected = [3, 7, 11] if later is Faulty else [3, 7]
    assert [row["step"] for row in rows if row["split"] == "verification"] == expected
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(1, 13))
    assert num_unreadable == 0
