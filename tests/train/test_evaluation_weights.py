"""The weights a model is judged by: their values against slow loops, and that the trained ones come back exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sheepop.train import EvaluationWeights, TrainingConfig, build_evaluation_weights, build_optimizers
from sheepop.train.evaluation_weights import AveragedWeights, ScheduleFreeWeights, TrainedWeights

FREE = {"optimizer": "schedule_free_adamw", "schedule": "constant", "learning_rate": 0.1}


def build(**settings: object) -> tuple[nn.Module, list[torch.optim.Optimizer], EvaluationWeights]:
    torch.manual_seed(0)
    network = nn.Linear(5, 4)
    config = TrainingConfig(**settings)
    optimizers = build_optimizers(network, config)
    return network, optimizers, build_evaluation_weights(network, optimizers, config)


def train(
    network: nn.Module, optimizers: list[torch.optim.Optimizer], evaluation: EvaluationWeights, step: int
) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()
    evaluation.update(step)


def flat(network: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).double().numpy()


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_the_average_is_that_of_a_loop(decay: float) -> None:
    network, optimizers, evaluation = build(ema_decay=decay, learning_rate=0.1)
    average = flat(network)
    for step in range(100):
        train(network, optimizers, evaluation, step)
        t = step + 1
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * flat(network)
        with evaluation.applied():
            np.testing.assert_allclose(flat(network), average, rtol=1e-5, atol=1e-5)


def test_early_averages_forget_the_initial_weights_fast() -> None:
    """With weights 0 before the first step and 1 after it, the average is 9/11 at once, whatever the decay."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    evaluation = AveragedWeights(network, 0.9999)
    nn.init.ones_(network.weight)
    evaluation.update(0)
    with evaluation.applied():
        assert network.weight.item() == pytest.approx(9 / 11)


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, FREE], ids=["average", "schedule-free"])
def test_the_trained_weights_come_back_bit_for_bit_to_their_place(settings: dict[str, object]) -> None:
    network, optimizers, evaluation = build(**settings)
    for step in range(5):
        train(network, optimizers, evaluation, step)
    trained = [parameter.detach().clone() for parameter in network.parameters()]
    places = [parameter.data_ptr() for parameter in network.parameters()]
    for _ in range(3):
        with evaluation.applied():
            assert not any(torch.equal(*pair) for pair in zip(network.parameters(), trained, strict=True))
            applied = flat(network)
            with evaluation.applied():
                assert np.array_equal(flat(network), applied)
            assert np.array_equal(flat(network), applied)
        assert all(torch.equal(*pair) for pair in zip(network.parameters(), trained, strict=True))
    assert [parameter.data_ptr() for parameter in network.parameters()] == places


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, FREE], ids=["average", "schedule-free"])
def test_they_come_back_from_an_error_too_and_training_goes_on_as_if_nothing_was(settings: dict[str, object]) -> None:
    (one, *rest_of_one), (other, *rest_of_other) = build(**settings), build(**settings)
    for step in range(6):
        train(one, *rest_of_one, step)
        train(other, *rest_of_other, step)
        with pytest.raises(RuntimeError, match="validation failed"), rest_of_other[-1].applied():
            raise RuntimeError("validation failed")
    assert np.array_equal(flat(one), flat(other))
    with rest_of_one[-1].applied(), rest_of_other[-1].applied():
        assert np.array_equal(flat(one), flat(other))


def test_before_the_first_step_all_weights_are_the_initial_ones() -> None:
    for settings in ({"ema_decay": 0.9}, FREE, {}):
        network, _, evaluation = build(**settings)
        before = flat(network)
        with evaluation.applied():
            assert np.array_equal(flat(network), before)


def test_the_configuration_says_which_weights_are_judged() -> None:
    kinds = [type(build(**settings)[2]) for settings in ({}, {"ema_decay": 0.9}, FREE)]
    assert kinds == [TrainedWeights, AveragedWeights, ScheduleFreeWeights]
    assert [kind.differ for kind in kinds] == [False, True, True]
