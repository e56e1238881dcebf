"""Rotary angles against complex numbers in float64; added tables; what bad positions do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.model import ModelConfig, build_model
from sheepop.model.attention.fused import FusedAttention
from sheepop.model.positions import RotaryPositions, rotary_tables, rotate
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling


def complex_rotation(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Columns (i, i + C/2) of x (T, C) as one complex number, times exp(i p base^(-2i/C)); in float64."""
    half = x.shape[1] // 2
    numbers = x[:, :half] + 1j * x[:, half:]
    for row, position in enumerate(positions):
        for column in range(half):
            numbers[row, column] *= np.exp(1j * position * base ** (-2 * column / x.shape[1]))
    return np.concatenate((numbers.real, numbers.imag), axis=1)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 2.0])
@pytest.mark.parametrize("head_dim", [2, 8, 14])
def test_rotation_is_multiplication_by_a_complex_number(base, head_dim):
    x = np.random.RandomState(1).randn(64, head_dim)
    found = rotate(torch.from_numpy(x).float(), *rotary_tables(64, head_dim, base))
    np.testing.assert_allclose(found, complex_rotation(x, np.arange(64), base), atol=2e-6)


def test_far_positions_keep_their_phase():
    # float32 angles would be wrong by about 1e-2 radians here.
    cos, sin = rotary_tables(200_000, 4)
    assert cos[199_999, 0].item() == pytest.approx(np.cos(199_999.0), abs=1e-6)
    assert sin[199_999, 1].item() == pytest.approx(np.sin(1999.99), abs=1e-6)


def test_yarn_keeps_the_fastest_pair_of_a_context_in_which_none_turns_often():
    """By hand: 16 positions are 16 / (2 pi) = 2.5 turns of the fastest pair, fewer than beta_fast = 32.

    So the ramp would begin at a negative pair, and begins at pair 0. It ends at pair 1, the first with under one turn.
    """
    scaling = RotaryScaling(kind="yarn", factor=4.0, original_max_seq_len=16)
    frequencies, _ = rotary_frequencies(8, 10000.0, scaling)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1 / 4, 0.01 / 4, 0.001 / 4], rel=1e-12)


def test_angles_of_a_long_context_are_computed_when_they_are_needed():
    config = ModelConfig(d_model=8, num_heads=1, max_seq_len=10_000, position_encoding="rope")
    positions = RotaryPositions(config)
    whole = rotary_tables(10_000, 8)
    assert len(positions.cos) < 10_000
    with torch.inference_mode():
        for found, expected in zip(positions(2, torch.tensor([[5000, 7]])), whole, strict=True):
            assert torch.equal(found[0, 0], expected[[5000, 7]])
    assert len(positions.cos) < 10_000
    x = torch.ones(1, 1, 3000, 8, requires_grad=True)
    rotate(x, *positions(3000, None)).sum().backward()
    for found, expected in zip(positions(10_000, None), whole, strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(IndexError):
        positions(1, torch.tensor([[10_000]]))


def test_given_positions_choose_the_angles():
    config = ModelConfig(d_model=8, num_heads=1, max_seq_len=32, position_encoding="rope", position_base=100.0)
    positions = torch.tensor([[3, 0, 31], [7, 7, 1]])
    x = np.random.RandomState(2).randn(2, 3, 8)
    found = rotate(torch.from_numpy(x).float()[:, None], *RotaryPositions(config)(3, positions))
    for row in range(2):
        expected = complex_rotation(x[row], positions[row].numpy(), 100.0)
        np.testing.assert_allclose(found[row, 0], expected, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(query=st.integers(0, 500), key=st.integers(0, 500), shift=st.integers(0, 500), seed=st.integers(0, 2**31 - 1))
def test_scores_depend_on_the_difference_of_positions_only(query, key, shift, seed):
    cos, sin = rotary_tables(1024, 16)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))

    def score(at_query: int, at_key: int) -> float:
        turned_q, turned_k = rotate(q, cos[at_query], sin[at_query]), rotate(k, cos[at_key], sin[at_key])
        return (turned_q @ turned_k).item()

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=2e-5)


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, 1023), seed=st.integers(0, 2**31 - 1))
def test_rotation_keeps_norms(position, seed):
    cos, sin = rotary_tables(1024, 16)
    x = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    assert rotate(x, cos[position], sin[position]).norm().item() == pytest.approx(x.norm().item(), rel=1e-6)


def test_rotated_queries_keep_their_dtype_so_that_attention_runs_in_it():
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, *rotary_tables(3, 8))
    assert turned.dtype == torch.bfloat16
    # The products are taken in float32 and rounded once.
    assert torch.equal(turned, rotate(x.float(), *rotary_tables(3, 8)).bfloat16())
    assert FusedAttention(is_causal=True).attend(turned, turned, x).dtype == torch.bfloat16


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "rope"])
@pytest.mark.parametrize("position", [-1, 8])
def test_positions_outside_the_table_raise(encoding, position):
    model = build_model(
        ModelConfig(vocab_size=9, d_model=8, num_layers=1, num_heads=2, max_seq_len=8, position_encoding=encoding), 0
    )
    with pytest.raises(IndexError):
        model(torch.tensor([[1, 2]]), positions=torch.tensor([[0, position]]))


def test_rotary_positions_alone_decide_nothing_when_shifted(toy_network):
    model = toy_network(position_encoding="rope", max_seq_len=32)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    shifted = model(ids, positions=torch.arange(20, 25)[None])
    torch.testing.assert_close(model(ids), shifted, atol=1e-5, rtol=0)
    stretched = model(ids, positions=torch.arange(0, 10, 2)[None])
    assert (model(ids) - stretched).abs().max() > 1e-2
