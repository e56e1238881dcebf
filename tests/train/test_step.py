"""The gradients of a step, against autograd in float64 over the mean of all its tokens."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sheepop.data import Batch
from sheepop.model import LossSums, LossTerms
from sheepop.train import Trainer
from sheepop.train.objective import NextToken
from sheepop.train.placement import Network
from sheepop.train.precision import LossScale
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

from .runs import assert_same_run, gradients_of, timeless

MakeTrainer = Callable[..., Trainer]


def prepared(trainer: Trainer, batch: Batch, micro_batch_size: int) -> PreparedStep:
    return PreparedStep.of(batch, micro_batch_size, trainer.runner.objective, device="cpu")


@pytest.fixture
def uneven(make_trainer: MakeTrainer) -> tuple[Trainer, Batch]:
    """A trainer without dropout and a batch of eight rows, the last of which have few labels."""
    trainer = make_trainer("run", dropout=0.0)
    batch = trainer.source.schedule.batch(0)
    labels = batch.labels.copy()
    labels[6:, 3:] = -100
    return trainer, replace(batch, labels=labels)


@pytest.mark.parametrize(("micro_batch_size", "pieces"), [(8, [8]), (3, [3, 3, 2]), (1, [1] * 8), (100, [8])])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_the_gradient_is_that_of_the_mean_over_all_tokens_however_the_rows_are_cut(
    uneven: tuple[Trainer, Batch], micro_batch_size: int, pieces: list[int], loss_scale: float
) -> None:
    trainer, batch = uneven
    exact = copy.deepcopy(trainer.model).double()
    whole = prepared(trainer, batch, 8).micro_batches[0]
    loss = F.cross_entropy(exact(**whole.inputs).flatten(0, 1), whole.labels.flatten())
    loss.backward()
    step, heard = prepared(trainer, batch, micro_batch_size), []
    assert [len(piece.labels) for piece in step.micro_batches] == pieces
    losses = gradients_of(
        trainer.runner.placement, trainer.runner.objective, step, loss_scale=loss_scale, before_forward=heard.append
    )
    assert heard == list(range(len(pieces)))
    assert losses.num_tokens == step.num_tokens == np.count_nonzero(batch.labels != -100)
    assert losses.means() == pytest.approx((loss.item(), loss.item()), rel=1e-5)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_a_step_in_which_no_token_counts_has_a_loss_and_gradients_of_zero(
    uneven: tuple[Trainer, Batch], micro_batch_size: int
) -> None:
    trainer, batch = uneven
    empty = replace(batch, labels=np.full_like(batch.labels, -100))
    losses = gradients_of(
        trainer.runner.placement, trainer.runner.objective, prepared(trainer, empty, micro_batch_size)
    )
    assert losses.means() == (0.0, 0.0)
    assert all(not parameter.grad.any() for parameter in trainer.model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_computing_a_step_twice_adds_nothing_to_loss_and_gradients(
    uneven: tuple[Trainer, Batch], micro_batch_size: int
) -> None:
    trainer, batch = uneven
    trainer.runner.objective = NextToken(LossTerms(label_smoothing=0.1))
    step = prepared(trainer, batch, micro_batch_size)
    trainer.runner.max_grad_norm = None
    plain = trainer.runner.gradients(step).losses.means()
    gradients = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    trainer.model.zero_grad(set_to_none=True)
    heard: list[int] = []
    found = trainer.runner.gradients(step, before_forward=heard.append, verified=True)
    verified = found.losses
    assert found.differences == []
    assert heard == 2 * [*range(len(step.micro_batches))]
    assert verified.means() == plain
    assert all(torch.equal(*pair) for pair in zip((p.grad for p in trainer.model.parameters()), gradients, strict=True))


class Wild(NextToken):
    """Multiplies the loss of some of the micro-batches that it sees, counted from 0."""

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__()
        object.__setattr__(self, "factors", factors)  # the usual objective is frozen
        object.__setattr__(self, "calls", itertools.count())

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        sums, factor = super().loss_sums(network, batch), self.factors.get(next(self.calls), 1.0)
        return LossSums(sums.objective * factor, sums.cross_entropy * factor)


@pytest.mark.parametrize(
    ("settings", "scale", "troubles"),
    [
        ({"optimizer": "adamw", "ema_decay": 0.8}, None, [10, 14, 17]),
        ({"optimizer": "adam", "max_grad_norm": None}, None, [10, 14, 17]),
        ({"optimizer": "sgd", "log_interval": 3}, None, [10, 14, 17]),
        # The scaled gradients of the spike overflow, so the step is passed over without a word.
        ({"optimizer": "adamw", "precision": "fp16"}, LossScale(scale=2.0**24), [10, 17]),
    ],
)
def test_a_decision_on_the_device_is_the_decision_of_the_host_bit_for_bit(
    make_trainer: MakeTrainer, settings: dict[str, Any], scale: LossScale | None, troubles: list[int]
) -> None:
    """A step of NaN is left out, one of a spike and one that overflows, and all else is as it is without a flag."""
    masked = dict.fromkeys(("host", "device"), 0)
    for name in masked:
        trainer = make_trainer(name, max_steps=20, trouble={"window": 16}, **settings)
        trainer.runner.objective = Wild({9: math.nan, 13: 1e4, 16: math.inf})
        trainer.runner.decides_on_device = name == "device"
        if scale is not None:
            trainer.state = trainer.state.after(loss_scale=scale)

        def count(optimizer: torch.optim.Optimizer, *_: Any, name: str = name) -> None:
            masked[name] += hasattr(optimizer, "found_inf")

        trainer.runner.optimizers[0].register_step_pre_hook(count)
        trainer.run()
        found = timeless(trainer.journal.metrics.path)
        assert [row["at_step"] for row in found if row["split"] == "trouble"] == troubles
        assert not hasattr(trainer.runner.optimizers[0], "found_inf")
    assert masked["host"] == 0
    assert masked["device"] >= 8
    one, other = (make_trainer(name, resume=True, max_steps=20, **settings) for name in masked)
    assert_same_run(one, other)
    for file in sorted(one.checkpointer.run.checkpoint(20).rglob("*.safetensors")):
        again = other.checkpointer.run.checkpoint(20) / file.relative_to(one.checkpointer.run.checkpoint(20))
        assert file.read_bytes() == again.read_bytes(), file


def test_an_optimizer_of_our_own_is_told_before_its_step(make_trainer: MakeTrainer) -> None:
    for name in ("host", "device"):
        trainer = make_trainer(name, max_steps=6, optimizer="lion")
        trainer.runner.objective = Wild({3: math.nan})
        trainer.runner.decides_on_device = name == "device"
        trainer.run()
    one, other = (make_trainer(name, resume=True, max_steps=6, optimizer="lion") for name in ("host", "device"))
    assert_same_run(one, other)


def test_a_step_taken_by_itself_moves_what_a_step_of_a_run_moves(make_trainer: MakeTrainer) -> None:
    """As range test, measurement and benchmark take it: averages and the biases of experts too."""
    settings: dict[str, Any] = {"ema_decay": 0.5, "warmup_steps": 0, "schedule": "constant", "max_steps": 1}
    experts = {"experts": {"count": 4, "bias_update_rate": 0.1}}
    run = make_trainer("run", network=experts, dropout=0.0, **settings)
    run.run()
    alone = make_trainer("alone", network=experts, dropout=0.0, **settings)
    outcome = alone.runner.take(alone.source.prepare(0), number=0, rate=0.01)
    assert outcome.is_taken
    assert alone.model.blocks[0].feed_forward.router.balance.abs().max() == pytest.approx(0.1)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, alone.model.state_dict()[name]), name
    with run.runner.evaluation.applied(), alone.runner.evaluation.applied():
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, alone.model.state_dict()[name]), name
