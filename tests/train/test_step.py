"""The gradients of a step, against autograd in float64 over the mean of all its tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sheepop.data import Batch
from sheepop.model import LossTerms
from sheepop.train import Trainer
from sheepop.train.objective import NextToken
from sheepop.train.source import PreparedStep

from .runs import gradients_of

MakeTrainer = Callable[..., Trainer]


def prepared(trainer: Trainer, batch: Batch, micro_batch_size: int) -> PreparedStep:
    return PreparedStep.of(batch, micro_batch_size, trainer.runner.objective, device="cpu")


@pytest.fixture
def uneven(make_trainer: MakeTrainer) -> tuple[Trainer, Batch]:
    """A trainer without dropout and a batch of eight rows, the last of which have few labels."""
    trainer = make_trainer("run", dropout=0.0)
    batch = trainer.source.plan.batch(0)
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
def test_computing_the_first_micro_batch_twice_adds_nothing_to_loss_and_gradients(
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
    assert heard == [0, *range(len(step.micro_batches))]
    assert verified.means() == plain
    assert all(torch.equal(*pair) for pair in zip((p.grad for p in trainer.model.parameters()), gradients, strict=True))
