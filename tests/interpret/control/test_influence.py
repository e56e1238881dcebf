"""Influences and impulse responses against full Jacobians, real passes, and uniform attention."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.interpret.control.influence import impulse, influence, influences
from sheepop.interpret.control.jacobian import singular_values
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.model import ModelConfig, build_model

from .conftest import SMALL, last_stream, matrix, point_of


def uniform_point() -> OperatingPoint:
    """Every token attends to all before it and itself alike, and attention passes vectors on unchanged."""
    model = build_model(ModelConfig(**{**SMALL, "num_heads": 1, "num_layers": 1, "bias": False}), seed=0).double()
    attention = model.blocks[0].attention
    for layer, weight in (("q", 0.0), ("v", 1.0), ("o", 1.0)):
        getattr(attention, f"{layer}_proj").weight.data = weight * torch.eye(8, dtype=torch.float64)
    return point_of(model, "sheeps")


def test_uniform_attention_has_known_influences_and_gain() -> None:
    attention = uniform_point().part(0, "attention_input", "attention_output")
    found, error = influences(attention, probes=4)
    expected = torch.tensor([[1 / (i + 1) if j <= i else 0.0 for j in range(6)] for i in range(6)], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert float(error.max()) < 1e-6
    assert singular_values(attention).largest[0].value == pytest.approx(1.3377, abs=1e-4)


def test_influences_are_norms_of_the_blocks_of_the_full_jacobian(point: OperatingPoint) -> None:
    full = matrix(last_stream(point.model, point.trace.token_ids), point.states[0]).view(5, 8, 5, 8)
    exact = full.square().sum((1, 3)).div(8).sqrt()
    found = influence(point, probes=150)
    torch.testing.assert_close(found.influence, exact, rtol=0.15, atol=0)
    assert found.influence.triu(1).abs().max() == 0
    few = influence(point, probes=8)
    inside = (few.influence - exact).abs() <= few.influence * few.error * 1.05
    assert int(inside.sum()) >= 22  # of 25, of which 10 are 0


def test_rollout_is_the_product_of_the_mean_weights_with_the_residual(point: OperatingPoint) -> None:
    found = influence(point)
    rolled, mean = torch.eye(5, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)
    for layer in range(3):
        weights = point.trace[f"blocks.{layer}.attention.weights"].mean(0)
        rolled = (0.5 * weights + 0.5 * torch.eye(5)) @ rolled
        mean += weights / 3
    torch.testing.assert_close(found.rollout, rolled)
    torch.testing.assert_close(found.attention, mean)
    for shares in found.shares.values():
        torch.testing.assert_close(shares.sum(1), torch.ones(5, dtype=torch.float64))
    assert "Besides its own token" in found.sentences()[0]


def test_an_impulse_arrives_at_later_tokens_only(point: OperatingPoint) -> None:
    found = impulse(point, 2, size=1e-4, probes=6)
    assert found.most_before == 0.0 and float(found.response[:, :2].abs().max()) == 0.0
    assert float(found.response[0, 2]) == pytest.approx(1.0)
    assert float(found.response[1:, 2:].min()) > 0
    torch.testing.assert_close(found.response, found.linear, rtol=1e-2, atol=1e-4)
    assert "Before token 2 the response is exactly 0." in found.sentences()


def test_an_impulse_is_followed_in_the_real_network(point: OperatingPoint) -> None:
    """The response to one direction is that of an ordinary pass with the changed vector."""
    found = impulse(point, -1, size=0.5, probes=1)
    pass_ = last_stream(point.model, point.trace.token_ids)
    squares = []
    for sign_bits in range(2**8):
        direction = torch.tensor([1.0 if sign_bits >> bit & 1 else -1.0 for bit in range(8)], dtype=torch.float64)
        change = torch.zeros_like(point.states[0])
        length = 0.5 * point.states[0][4].norm()
        change[4] = direction * length / math.sqrt(8)
        squares.append(float((pass_(point.states[0] + change) - point.states[-1])[4].norm() / length))
    assert min(abs(value - float(found.response[-1, 4])) for value in squares) < 1e-9
    assert found.nonlinearity > 1e-3


@pytest.mark.parametrize(("position", "size", "problem"), [(5, 0.1, "--position 5 is outside"), (0, 0.0, "positive")])
def test_impossible_impulses_are_refused(point: OperatingPoint, position: int, size: float, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        impulse(point, position, size=size)


def test_one_token_reaches_itself() -> None:
    lone = point_of(build_model(ModelConfig(**SMALL), seed=0).double(), "s")
    assert influence(lone).influence.shape == (1, 1) and impulse(lone, 0).response.shape == (4, 1)
    assert len(influence(lone).sentences()) == 2
