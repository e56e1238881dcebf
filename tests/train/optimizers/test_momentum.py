"""Muon and its iteration, against singular value decompositions in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from sheepop.train.optimizers.momentum import Muon, orthogonalize


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


def test_a_stack_of_matrices_takes_the_step_that_each_would_take_alone() -> None:
    """More experts in a stack than rows or columns in each of them, so that the stack's own size would stand out."""
    weights, gradients = torch.randn(2, 12, 3, 5, generator=torch.Generator().manual_seed(2))
    stack, alone = nn.Parameter(weights.clone()), [nn.Parameter(matrix.clone()) for matrix in weights]
    stack.grad = gradients.clone()
    for matrix, gradient in zip(alone, gradients * torch.logspace(-2, 2, 12)[:, None, None], strict=True):
        matrix.grad = gradient  # whose size is no matter: each is orthogonalised by itself
    for parameters in ([stack], alone):
        Muon(parameters, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in alone]))


def test_muon_refuses_what_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match="Muon is for matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_a_stack_takes_the_steps_of_its_matrices_on_their_own() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3, 6, 4, generator=generator)
    stack, alone = nn.Parameter(start.clone()), [nn.Parameter(matrix.clone()) for matrix in start]
    optimizers = [Muon(parameters, lr=0.05, weight_decay=0.1) for parameters in ([stack], alone)]
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator)
        for matrix, gradient in zip(alone, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack(alone).detach(), atol=1e-6, rtol=0)
