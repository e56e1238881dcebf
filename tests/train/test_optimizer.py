"""AdamW, Muon, decay groups and clipping, against hand-worked values and float64 references."""

import numpy as np
import pytest
import torch
from torch import nn

from sheepop.model import ModelConfig, build_model
from sheepop.train import TrainingConfig, build_optimizers, clip_gradients
from sheepop.train.muon import Muon, orthogonalize
from sheepop.train.optimizer import set_learning_rate


def one_matrix(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return module


def test_adamw_gives_the_worked_values() -> None:
    module = one_matrix(0.5)
    config = TrainingConfig(learning_rate=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    (optimizer,) = build_optimizers(module, config)
    seen = []
    for gradient in (0.3, -0.2):
        module.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        seen.append(module.weight.item())
    assert seen == pytest.approx([0.498995000, 0.498845490], abs=1e-7)


def test_decay_is_decoupled_from_the_gradient() -> None:
    module = one_matrix(0.5)
    (optimizer,) = build_optimizers(module, TrainingConfig(learning_rate=0.1, weight_decay=0.2))
    module.weight.grad = torch.zeros(1, 1)
    optimizer.step()
    assert module.weight.item() == pytest.approx(0.5 * (1 - 0.1 * 0.2))


def test_only_matrices_are_decayed() -> None:
    model = build_model(
        ModelConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=20, position_encoding="learned"), 0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for optimizer in build_optimizers(model, TrainingConfig(learning_rate=0.1, weight_decay=0.5)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_belongs_to_exactly_one_group(optimizer: str) -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=2, num_heads=2, vocab_size=20), 0)
    optimizers = build_optimizers(model, TrainingConfig(optimizer=optimizer))
    held = [id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    if optimizer == "muon":
        inner = {id(p) for name, p in model.named_parameters() if "blocks." in name and p.ndim == 2}
        assert {id(p) for group in optimizers[0].param_groups for p in group["params"]} == inner


def test_set_learning_rate_reaches_every_group() -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=20), 0)
    optimizers = build_optimizers(model, TrainingConfig(optimizer="muon"))
    set_learning_rate(optimizers, 0.25)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.25}


def with_gradient(values: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_clipping_by_global_norm_gives_the_worked_values() -> None:
    parameters = [with_gradient([0.5]), with_gradient([0.8, 1.2])]
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx(1.526434, abs=1e-6)
    clipped = torch.cat([parameter.grad for parameter in parameters])
    assert clipped.tolist() == pytest.approx([0.327561, 0.524097, 0.786146], abs=1e-6)


def test_a_small_gradient_is_left_as_it_is() -> None:
    parameter = with_gradient([0.3, 0.4])
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])


def test_without_a_maximum_the_norm_is_measured_only() -> None:
    parameter = with_gradient([30.0, 40.0])
    assert clip_gradients([parameter], None).item() == pytest.approx(50.0)
    assert parameter.grad.tolist() == [30.0, 40.0]


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonalize_follows_the_polynomial_of_its_singular_values(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(3).standard_normal(shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ np.diag(values) @ right
    result = orthogonalize(torch.tensor(matrix, dtype=torch.float32)[None])[0]
    np.testing.assert_allclose(result.numpy(), expected, atol=2e-4)
    assert values.min() > 0.4 and values.max() < 1.4


def test_muon_equals_a_float64_reference_over_several_steps() -> None:
    rng = np.random.default_rng(5)
    weight, momentum = rng.standard_normal((6, 10)), np.zeros((6, 10))
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = Muon([parameter], lr=0.05, momentum=0.9, weight_decay=0.1)
    for _ in range(4):
        gradient = rng.standard_normal((6, 10))
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        update = 0.1 * gradient + 0.9 * momentum
        left, values, right = np.linalg.svd(update, full_matrices=False)
        values = values / np.linalg.norm(update)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        weight = weight * (1 - 0.05 * 0.1) - 0.05 * 0.2 * np.sqrt(10) * (left @ np.diag(values) @ right)
    np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=1e-4)


def test_muon_refuses_what_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match="Muon is for matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)
