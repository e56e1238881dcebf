"""Rotary frequencies, ALiBi slopes and the losses of routers against those of the transformers library."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sheepop.model.experts import Routing
from sheepop.model.positions import alibi_slopes
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

FIFTH = int(transformers.__version__.split(".")[0]) >= 5


def theirs(
    kind: str, head_dim: int, base: float, partial: float, keys: dict[str, Any], seq_len: int | None = None
) -> tuple[torch.Tensor, float]:
    """Frequencies and factor by the library; `keys` in its own words."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, **keys}
    if FIFTH:
        rope |= {"rope_theta": base, "partial_rotary_factor": partial}
        given_rope: dict[str, Any] = {"rope_parameters": rope}
    else:
        given_rope = {"rope_scaling": rope, "rope_theta": base, "partial_rotary_factor": partial}
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=64, **given_rope
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies, factor


shapes = st.tuples(st.sampled_from([16, 64, 80, 128]), st.sampled_from([1.0, 0.5, 0.25]))
bases = st.sampled_from([500.0, 10_000.0, 500_000.0, 1e7])
factors = st.floats(1.0, 64.0)


def check(found: tuple[torch.Tensor, float], expected: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(found[0].float(), expected[0], rtol=2e-5, atol=0)
    assert found[1] == pytest.approx(expected[1])


@given(shape=shapes, base=bases, factor=factors)
def test_linear_frequencies_are_those_of_transformers(shape, base, factor) -> None:
    ours = rotary_frequencies(int(shape[0] * shape[1]), base, RotaryScaling(kind="linear", factor=factor))
    check(ours, theirs("linear", shape[0], base, shape[1], {"factor": factor}))


@given(shape=shapes, base=bases, factor=st.integers(1, 64))
def test_ntk_frequencies_are_those_of_dynamic_ntk_at_a_context_factor_times_as_long(shape, base, factor) -> None:
    """Their base grows with the length seen; at 64 `factor` places, without a factor of their own, it is ours."""
    ours = rotary_frequencies(int(shape[0] * shape[1]), base, RotaryScaling(kind="ntk", factor=factor))
    check(ours, theirs("dynamic", shape[0], base, shape[1], {"factor": 1.0}, seq_len=64 * factor))


@given(
    shape=shapes,
    base=bases,
    factor=factors,
    original=st.sampled_from([1024, 4096, 32768]),
    betas=st.sampled_from([(32.0, 1.0), (16.0, 2.0), (40.0, 0.5)]),
    attention_factor=st.sampled_from([None, 0.8, 1.3]),
    truncate=st.booleans(),
)
def test_yarn_frequencies_are_those_of_transformers(
    shape, base, factor, original, betas, attention_factor, truncate
) -> None:
    scaling = RotaryScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        attention_factor=attention_factor,
        truncate=truncate,
    )
    keys = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "truncate": truncate,
    }
    if attention_factor is not None:
        keys["attention_factor"] = attention_factor
    check(rotary_frequencies(int(shape[0] * shape[1]), base, scaling), theirs("yarn", shape[0], base, shape[1], keys))


@given(
    shape=shapes,
    base=bases,
    factor=factors,
    original=st.sampled_from([256, 4096]),
    attention_factor=st.sampled_from([None, 0.8, 1.3]),
    data=st.data(),
)
def test_longrope_frequencies_are_those_of_transformers(shape, base, factor, original, attention_factor, data) -> None:
    pairs = int(shape[0] * shape[1]) // 2
    divisors = data.draw(st.lists(st.floats(1.0, 64.0), min_size=pairs, max_size=pairs))
    scaling = RotaryScaling(
        kind="longrope",
        factor=factor,
        original_max_seq_len=original,
        pair_factors=tuple(divisors),
        attention_factor=attention_factor,
    )
    keys = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "short_factor": divisors,
        "long_factor": divisors,
    }
    if attention_factor is not None:
        keys["attention_factor"] = attention_factor
    found = rotary_frequencies(2 * pairs, base, scaling)
    check(found, theirs("longrope", shape[0], base, shape[1], keys))


@given(
    shape=shapes,
    base=bases,
    factor=factors,
    original=st.sampled_from([256, 1024, 8192]),
    bounds=st.sampled_from([(1.0, 4.0), (0.5, 8.0), (2.0, 3.0)]),
)
def test_llama3_frequencies_are_those_of_transformers(shape, base, factor, original, bounds) -> None:
    low, high = bounds
    scaling = RotaryScaling(
        kind="llama3", factor=factor, original_max_seq_len=original, low_freq_factor=low, high_freq_factor=high
    )
    keys = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }
    check(rotary_frequencies(int(shape[0] * shape[1]), base, scaling), theirs("llama3", shape[0], base, shape[1], keys))


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 11, 12, 16, 20, 25, 32, 40, 112])
def test_alibi_slopes_are_those_of_bloom(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # Their bias of the second of two places is one slope.
    expected = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), expected)


@given(experts=st.integers(2, 8), per_token=st.integers(1, 2), tokens=st.integers(1, 40), seed=st.integers(0, 1000))
def test_the_losses_of_a_router_are_those_of_mixtral_and_switch(experts, per_token, tokens, seed) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    logits = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    routing = Routing(logits, logits.topk(per_token).indices)
    expected = load_balancing_loss_func((logits,), experts, per_token)
    torch.testing.assert_close(routing.load_balancing_loss(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routing.z_loss(), router_z_loss_func(logits[None]), rtol=1e-5, atol=1e-6)
