"""Products with Jacobians, singular values and typical gains, against full matrices and values known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sheepop.core.errors import UsageError
from sheepop.interpret.control.jacobian import Interval, Jacobian, singular_values, typical_gain
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

from ...model.architectures import ARCHITECTURES
from ..conftest import shaken
from .conftest import SMALL, last_stream, matrix, point_of

IDS = [7, 1, 4, 4, 30, 2]
DECODERS = [name for name, config in ARCHITECTURES.items() if config.architecture == "decoder"]


def linear(weight: Tensor) -> Jacobian:
    return Jacobian(lambda x: x @ weight.T, torch.zeros(weight.shape[1], dtype=weight.dtype))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", DECODERS)
def test_products_are_those_of_the_full_jacobian_of_every_architecture(name: str) -> None:
    model = shaken(build_model(ARCHITECTURES[name], seed=3)).double().eval().requires_grad_(False)
    point = point_of(model, IDS)
    whole = point.between(0, point.num_layers)
    expected = matrix(last_stream(model, IDS), point.states[0])
    tangent, cotangent = noise(*whole.point.shape), noise(*whole.point.shape, seed=1)
    torch.testing.assert_close(whole.jvp(tangent).flatten(), expected @ tangent.flatten())
    torch.testing.assert_close(whole.vjp(cotangent).flatten(), expected.T @ cotangent.flatten())


@pytest.mark.parametrize("name", ["sheepop", "mixtral", "delta nets", "latent"])
def test_float32_is_near_float64(name: str) -> None:
    model = shaken(build_model(ARCHITECTURES[name], seed=3))
    exact, rounded = (OperatingPoint.of(model, CharTokenizer(), IDS, dtype) for dtype in (torch.float64, torch.float32))
    tangent = noise(*exact.states[0].shape)
    found = rounded.between(0, 2).jvp(tangent.float()).double()
    torch.testing.assert_close(found, exact.between(0, 2).jvp(tangent), rtol=1e-2, atol=1e-3)


@settings(max_examples=25)
@given(rows=st.integers(1, 7), width=st.integers(1, 7), rank=st.integers(1, 7), seed=st.integers(0, 99))
def test_a_search_through_the_whole_space_finds_every_singular_value(
    rows: int, width: int, rank: int, seed: int
) -> None:
    weight = noise(rows, rank, seed=seed) @ noise(rank, width, seed=seed + 1)
    found = singular_values(linear(weight), count=7, steps=99, tolerance=0.0)
    expected = torch.linalg.svdvals(weight)
    assert found.is_whole
    values = torch.tensor([value.value for value in found.largest], dtype=torch.float64)
    torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
    assert max(value.residual for value in found.largest) <= 1e-12 * max(1.0, float(expected[0]))
    assert math.isclose(float((weight @ found.direction).norm()), float(expected[0]), rel_tol=1e-9)


def test_repeated_singular_values_are_all_found() -> None:
    found = singular_values(linear(3 * torch.eye(6, dtype=torch.float64)), count=6, steps=99, tolerance=0.0)
    assert [value.value for value in found.largest] == pytest.approx([3.0] * 6)


def test_a_residual_bounds_the_distance_to_a_singular_value() -> None:
    weight = noise(60, 80)
    exact = torch.linalg.svdvals(weight)
    for steps in (4, 8, 16):
        found = singular_values(linear(weight), count=2, steps=steps, tolerance=0.0)
        assert not found.is_whole and found.steps == steps
        for value in (*found.largest, *found.smallest):
            assert float((exact - value.value).abs().min()) <= value.residual + 1e-12
        assert found.largest[0].value <= float(exact[0]) + 1e-12
        assert found.smallest[0].value >= float(exact[-1]) - 1e-12


@pytest.mark.parametrize(("scale", "expected"), [(0.1, 1.1438), (1.0, 2.5981)])
def test_the_identity_plus_gaussian_noise_has_the_edge_of_random_matrix_theory(scale: float, expected: float) -> None:
    """The edge of the spectrum of I + W for large D, with W of independent N(0, s^2 / D)."""
    width = 1000
    weight = noise(width, width) * scale / math.sqrt(width)
    found = singular_values(Jacobian(lambda h: h + h @ weight.T, torch.zeros(width, dtype=torch.float64)), steps=48)
    assert found.largest[0].value == pytest.approx(expected, rel=0.01)


def test_random_residual_layers_grow_as_known() -> None:
    """E |J|_F^2 / N = (1 + s^2)^L for L layers h + W h."""
    width, depth, scale = 300, 6, 0.5
    weights = [noise(width, width, seed=layer) * scale / math.sqrt(width) for layer in range(depth)]

    def network(h: Tensor) -> Tensor:
        for weight in weights:
            h = h + h @ weight.T
        return h

    gain = typical_gain(Jacobian(network, torch.zeros(width, dtype=torch.float64)), probes=16)
    assert gain.value**2 == pytest.approx((1 + scale**2) ** depth, rel=0.05)


def test_intervals_contain_the_true_gain_as_often_as_they_say() -> None:
    weight = noise(50, 64)
    true = float(weight.norm()) / 8
    intervals = [typical_gain(linear(weight), probes=8, seed=seed) for seed in range(200)]
    covered = sum(each.low <= true <= each.high for each in intervals)
    assert 180 <= covered <= 199
    with pytest.raises(UsageError, match="at least 4 probes, not 3"):
        typical_gain(linear(weight), probes=3)


@pytest.mark.parametrize(("count", "quantile"), [(4, 3.182), (8, 2.365), (16, 2.131)])
def test_intervals_use_the_quantiles_of_students_distribution(count: int, quantile: float) -> None:
    samples = torch.tensor([100.0 + (-1) ** place for place in range(count)])
    deviation = math.sqrt(count / (count - 1))
    found = Interval.of_root(samples)
    assert found.high**2 - 100 == pytest.approx(quantile * deviation / math.sqrt(count), rel=0.01)


def test_a_linear_block_has_the_singular_values_of_the_identity_plus_its_matrix() -> None:
    """A real block without norms, whose attention adds nothing and whose feed-forward network is one matrix."""
    model = build_model(ModelConfig(**SMALL), seed=0).double()
    block = model.blocks[1]
    block.attention.o_proj.weight.data.zero_()
    block.feed_forward_norm = None
    block.feed_forward = nn.Linear(8, 8, bias=False).double()
    weight = noise(8, 8)
    block.feed_forward.weight.data = weight
    found = singular_values(point_of(model, "sheep").between(1, 2), count=3, steps=99, tolerance=0.0)
    expected = torch.linalg.svdvals(torch.eye(8) + weight)
    assert [value.value for value in found.largest] == pytest.approx([float(expected[0])] * 3)  # once at each token
    assert [value.value for value in found.smallest] == pytest.approx([float(expected[-1])] * 3)
