"""Every optimizer against its paper's formulas, written here as slow loops in float64, step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from sheepop.train import TrainingConfig, build_evaluation_weights, build_optimizers
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.optimizers import adafactor
from sheepop.train.optimizers.build import optimizer_slots
from sheepop.train.optimizers.groups import set_learning_rate

Array = NDArray[np.float64]
STEPS = 8
SHAPES = {
    "embedding.weight": (7, 4),
    "blocks.0.square.weight": (5, 5),
    "blocks.0.wide.weight": (3, 6),
    "blocks.1.square.weight": (5, 5),
    "blocks.1.tall.weight": (6, 3),
    "blocks.1.norm.weight": (6,),
    "final_norm.weight": (4,),
}


class Rule:
    """One parameter under one optimizer, in float64; `memory` is what it keeps between steps."""

    def __init__(self, weight: Array, **settings: Any) -> None:
        self.weight = weight.copy()
        self.settings = settings
        self.memory: dict[str, Any] = {}
        self.step_number = 0

    def step(self, gradient: Array, rate: float, decay: float) -> None:
        self.step_number += 1
        self.weight = self.update(gradient, rate, decay, self.step_number, **self.settings)

    def kept(self, name: str) -> Array:
        return self.memory.get(name, np.zeros_like(self.weight))

    def evaluated(self) -> Array:
        return self.weight

    def update(self, gradient: Array, rate: float, decay: float, t: int, **settings: Any) -> Array:
        raise NotImplementedError


class AdamW(Rule):
    """Loshchilov and Hutter 2019, algorithm 2, lines 7 to 12."""

    def update(self, gradient, rate, decay, t, betas=(0.9, 0.95), eps=1e-8):
        return self.adam(gradient, rate, t, betas, eps) - rate * decay * self.weight

    def adam(self, gradient, rate, t, betas, eps):
        m = self.memory["m"] = betas[0] * self.kept("m") + (1 - betas[0]) * gradient
        v = self.memory["v"] = betas[1] * self.kept("v") + (1 - betas[1]) * gradient**2
        return self.weight - rate * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)


class Adam(AdamW):
    """Kingma and Ba 2015, algorithm 1, with an L2 penalty in the gradient."""

    def update(self, gradient, rate, decay, t, betas=(0.9, 0.999), eps=1e-8):
        return self.adam(gradient + decay * self.weight, rate, t, betas, eps)


class SGD(Rule):
    """Heavy-ball momentum with an L2 penalty in the gradient."""

    def update(self, gradient, rate, decay, t, momentum=0.9):
        velocity = self.memory["v"] = momentum * self.kept("v") + gradient + decay * self.weight
        return self.weight - rate * velocity


class Muon(AdamW):
    """Jordan et al. 2024 with the scale of Liu et al. 2025; the singular values are computed, not iterated towards."""

    inner = False

    def update(self, gradient, rate, decay, t, betas=(0.9, 0.95), eps=1e-8, momentum=0.95):
        if not self.inner:
            return super().update(gradient, rate, decay, t, betas, eps)
        kept = self.memory["m"] = momentum * self.kept("m") + (1 - momentum) * gradient
        ahead = (1 - momentum) * gradient + momentum * kept
        left, values, right = np.linalg.svd(ahead, full_matrices=False)
        values = values / np.sqrt((values**2).sum())
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        scale = 0.2 * math.sqrt(max(gradient.shape))
        return self.weight * (1 - rate * decay) - rate * scale * (left * values) @ right


class Lion(Rule):
    """Chen et al. 2023, algorithm 2."""

    def update(self, gradient, rate, decay, t, betas=(0.9, 0.99)):
        direction = np.sign(betas[0] * self.kept("m") + (1 - betas[0]) * gradient)
        self.memory["m"] = betas[1] * self.kept("m") + (1 - betas[1]) * gradient
        return self.weight - rate * (direction + decay * self.weight)


class Adafactor(Rule):
    """Shazeer and Stern 2018, algorithm 4 with the sums of algorithm 1 for matrices, algorithm 5 for vectors."""

    def update(self, gradient, rate, decay, t, eps=1e-30):
        beta = 1 - t**-0.8
        squares = gradient**2 + eps
        if gradient.ndim == 2:
            rows, columns = gradient.shape
            row = self.memory.get("row", np.zeros(rows))
            column = self.memory.get("column", np.zeros(columns))
            for i in range(rows):
                row[i] = beta * row[i] + (1 - beta) * sum(squares[i])
            for j in range(columns):
                column[j] = beta * column[j] + (1 - beta) * sum(squares[:, j])
            self.memory.update(row=row, column=column)
            moment = np.array([[row[i] * column[j] / sum(row) for j in range(columns)] for i in range(rows)])
        else:
            moment = self.memory["v"] = beta * self.kept("v") + (1 - beta) * squares
        update = gradient / np.sqrt(moment)
        update = update / max(1.0, root_mean_square(update) / 1.0)
        size = max(1e-3, root_mean_square(self.weight)) * rate
        return self.weight - size * update - rate * decay * self.weight


class ScheduleFreeAdamW(Rule):
    """Defazio et al. 2024, algorithm 1, with the three sequences x, y and z."""

    def __init__(self, weight: Array, **settings: Any) -> None:
        super().__init__(weight, **settings)
        self.x, self.z, self.weights = weight.copy(), weight.copy(), 0.0

    def update(self, gradient, rate, decay, t, betas=(0.9, 0.999), eps=1e-8):
        v = self.memory["v"] = betas[1] * self.kept("v") + (1 - betas[1]) * gradient**2
        rate = rate * math.sqrt(1 - betas[1] ** t)
        self.z = self.z - rate * gradient / (np.sqrt(v) + eps) - rate * decay * self.weight
        self.weights += rate**2
        c = rate**2 / self.weights
        self.x = (1 - c) * self.x + c * self.z
        return (1 - betas[0]) * self.z + betas[0] * self.x

    def evaluated(self) -> Array:
        return self.x


def root_mean_square(values: Array) -> float:
    return math.sqrt((values**2).mean())


RULES: dict[str, type[Rule]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "muon": Muon,
    "lion": Lion,
    "adafactor": Adafactor,
    "schedule_free_adamw": ScheduleFreeAdamW,
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.99), "eps": 1e-3},
    "adam": {"betas": (0.7, 0.9), "eps": 1e-3},
    "sgd": {"momentum": 0.5},
    "muon": {"betas": (0.8, 0.99), "eps": 1e-3, "momentum": 0.5},
    "lion": {"betas": (0.6, 0.7)},
    "adafactor": {"eps": 0.5},
    "schedule_free_adamw": {"betas": (0.95, 0.9), "eps": 1e-3},
}
every_optimizer = pytest.mark.parametrize("name", list(OPTIMIZER_NAMES))


class Network(nn.Module):
    """Parameters of the kinds that a transformer has, by the same names, and nothing that computes."""

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__()
        for name, weight in weights.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.tensor(weight, dtype=torch.float32)))


def draw(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    # What float32 holds, so that both sides start from the same numbers.
    return {name: rng.standard_normal(shape).astype(np.float32).astype(np.float64) for name, shape in SHAPES.items()}


def configured(name: str, **settings: Any) -> TrainingConfig:
    schedule = "constant" if name == "schedule_free_adamw" else "cosine"
    return TrainingConfig(optimizer=name, schedule=schedule, **settings)


def give_gradients(network: nn.Module, gradients: dict[str, Array]) -> None:
    for name, parameter in network.named_parameters():
        parameter.grad = torch.tensor(gradients[name], dtype=torch.float32)


def rate_of(step: int) -> float:
    return 0.05 * (step + 1) / 3 if step < 3 else 0.05 * 0.9**step


@pytest.mark.parametrize("customary", [True, False])
@every_optimizer
def test_every_step_is_that_of_the_paper(name: str, customary: bool) -> None:
    settings = {} if customary else OTHER_SETTINGS[name]
    layers = () if customary else ({"pattern": "blocks.0.*", "learning_rate": 0.3, "weight_decay": 0.7},)
    weights = draw(0)
    network = Network(weights)
    config = configured(name, weight_decay=0.2, layers=layers, **settings)
    optimizers = build_optimizers(network, config)
    evaluation = build_evaluation_weights(network, optimizers, config)
    rules = {parameter: RULES[name](weights[parameter], **settings) for parameter in SHAPES}
    for parameter, rule in rules.items():
        if isinstance(rule, Muon):
            rule.inner = "blocks." in parameter and len(SHAPES[parameter]) == 2
    for step in range(STEPS):
        gradients = draw(step + 1)
        give_gradients(network, gradients)
        set_learning_rate(optimizers, rate_of(step))
        for optimizer in optimizers:
            optimizer.step()
        for parameter, rule in rules.items():
            special = not customary and parameter.startswith("blocks.0.")
            decay = (0.7 if special else 0.2) if len(SHAPES[parameter]) == 2 else 0.0
            rule.step(gradients[parameter], rate_of(step) * (0.3 if special else 1.0), decay)
            found = network.get_parameter(parameter).detach().numpy()
            np.testing.assert_allclose(found, rule.weight, rtol=2e-5, atol=2e-5, err_msg=f"{parameter}, step {step}")
        with evaluation.applied():
            for parameter, rule in rules.items():
                found = network.get_parameter(parameter).detach().numpy()
                np.testing.assert_allclose(found, rule.evaluated(), rtol=2e-5, atol=2e-5, err_msg=parameter)


def test_adafactor_takes_the_steps_of_torch_while_its_own_schedule_does_not_bind() -> None:
    """Torch's has the paper's cap of the rate, 1 / sqrt(t), built in: 0.01 stays below it for 10,000 steps."""
    mine, theirs = Network(draw(0)), Network(draw(0))
    (ours,) = build_optimizers(mine, TrainingConfig(optimizer="adafactor", learning_rate=0.01, weight_decay=0.0))
    torchs = torch.optim.Adafactor(theirs.parameters(), lr=0.01)
    for step in range(STEPS):
        for network, optimizer in ((mine, ours), (theirs, torchs)):
            give_gradients(network, draw(step + 1))
            optimizer.step()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), msg=name)


@every_optimizer
def test_the_state_has_the_declared_slots_in_float32(name: str) -> None:
    network = Network(draw(0))
    optimizers = build_optimizers(network, configured(name))
    give_gradients(network, draw(1))
    for optimizer in optimizers:
        optimizer.step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                shapes = {slot: tuple(value.shape) if torch.is_tensor(value) else None for slot, value in state.items()}
                assert shapes == dict(optimizer_slots(optimizer, group, parameter))
                assert {value.dtype for value in state.values() if torch.is_tensor(value)} == {torch.float32}


def test_without_momentum_sgd_keeps_nothing() -> None:
    network = Network(draw(0))
    (optimizer,) = build_optimizers(network, configured("sgd", momentum=0.0))
    give_gradients(network, draw(1))
    optimizer.step()
    group = optimizer.param_groups[0]
    assert dict(optimizer_slots(optimizer, group, group["params"][0])) == {}
    assert not any(optimizer.state.values())


@every_optimizer
def test_a_parameter_without_a_gradient_stays_as_it_is(name: str) -> None:
    network = Network(draw(0))
    optimizers = build_optimizers(network, configured(name))
    for step in range(3):
        give_gradients(network, draw(step + 1))
        still = network.get_parameter("blocks.1.square.weight")
        before = still.detach().clone()
        still.grad = None
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(still, before)


@pytest.mark.parametrize("name", ["lion", "adafactor", "schedule_free_adamw"])
def test_one_that_starts_late_takes_the_steps_of_one_that_starts_alone(name: str) -> None:
    """Steps are counted by parameter, so that another parameter's history is none of its business."""
    late, alone = Network(draw(0)), Network(draw(0))
    key = "blocks.1.square.weight"
    for network, first in ((late, 0), (alone, 2)):
        (optimizer,) = build_optimizers(network, configured(name))
        for step in range(first, 5):
            give_gradients(network, draw(step + 1))
            if step < 2:
                network.get_parameter(key).grad = None
            optimizer.step()
    assert torch.equal(late.get_parameter(key), alone.get_parameter(key))


def test_schedule_free_weighs_the_average_of_each_parameter_by_the_rates_that_it_took() -> None:
    """Two that took turns have taken one step each, one of them at twice the rate; then both go on together."""
    weights, turns = draw(0), (("blocks.0.square.weight",), ("blocks.1.square.weight",))
    both = turns[0] + turns[1]
    network, config = Network(weights), configured("schedule_free_adamw", weight_decay=0.2)
    optimizers = build_optimizers(network, config)
    rules = {name: ScheduleFreeAdamW(weights[name]) for name in both}
    for step, names in enumerate((*turns, both, both)):
        gradients = draw(step + 1)
        give_gradients(network, gradients)
        for name, parameter in network.named_parameters():
            if name not in names:
                parameter.grad = None
        set_learning_rate(optimizers, rate_of(step))
        optimizers[0].step()
        for name in names:
            rules[name].step(gradients[name], rate_of(step), 0.2)
    for name, rule in rules.items():
        found = network.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(found, rule.weight, rtol=2e-5, atol=2e-5, err_msg=name)
    with build_evaluation_weights(network, optimizers, config).applied():
        for name, rule in rules.items():
            found = network.get_parameter(name).detach().numpy()
            np.testing.assert_allclose(found, rule.evaluated(), rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["muon", "lion", "adafactor", "schedule_free_adamw"])
def test_a_closure_is_refused(name: str) -> None:
    optimizer = build_optimizers(Network(draw(0)), configured(name))[0]
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


def test_adafactor_moves_what_is_zero_by_the_smallest_scale() -> None:
    """Algorithm 4: a parameter counts as at least 0.001 large, without which one that begins at 0 would stay there."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([2.0, -2.0, 2.0])  # after one step each is divided by its own size
    adafactor.Adafactor([parameter], lr=0.5).step()
    assert parameter.tolist() == pytest.approx([-0.5e-3, 0.5e-3, -0.5e-3])
