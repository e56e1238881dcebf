"""The gated delta rule in chunks and step by step, against a loop over tokens in float64 and transformers' own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sheepop.model.mixers.delta_rule import gated_delta_rule

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 5, 3


def drawn(rows: int, length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """States, queries, keys, values, logarithms of the decays, and betas, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (functional.normalize(draw(rows, length, KEY_HEADS, KEY), dim=-1) for _ in "qk")
    decays, betas = -functional.softplus(draw(rows, length, HEADS)), draw(rows, length, HEADS).sigmoid()
    return draw(rows, HEADS, KEY, VALUE), q, k, draw(rows, length, HEADS, VALUE), decays, betas


def looped(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, documents: Tensor | None
) -> Tensor:
    """One token of one head after another."""
    out = torch.zeros_like(v)
    for row in range(len(v)):
        for head in range(HEADS):
            state, group = states[row, head].clone(), head * KEY_HEADS // HEADS
            for t in range(v.shape[1]):
                if documents is not None and t > 0 and documents[row, t] != documents[row, t - 1]:
                    state = torch.zeros_like(state)
                key, query = k[row, t, group], q[row, t, group]
                state = state * math.exp(log_decay[row, t, head])
                error = v[row, t, head] - state.T @ key
                state = state + torch.outer(key, beta[row, t, head] * error)
                out[row, t, head] = state.T @ query
    return out


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_chunks_equal_a_loop_over_tokens(length: int) -> None:
    inputs = drawn(2, length)
    found, _ = gated_delta_rule(*inputs)
    torch.testing.assert_close(found, looped(*inputs, None), atol=1e-12, rtol=0)


def test_a_document_begins_without_a_state_and_the_first_one_with_the_given() -> None:
    inputs = drawn(2, 150)
    begins = torch.zeros(2, 150, dtype=torch.long)
    begins[0, [1, 20, 64, 65, 128]] = begins[1, [63, 130]] = 1
    documents = begins.cumsum(1)
    found, states = gated_delta_rule(*inputs, documents=documents)
    torch.testing.assert_close(found, looped(*inputs, documents), atol=1e-12, rtol=0)
    last = [gated_delta_rule(0 * inputs[0][:1], *(x[:1, 128:] for x in inputs[1:]))[1],
            gated_delta_rule(0 * inputs[0][1:], *(x[1:, 130:] for x in inputs[1:]))[1]]  # fmt: skip
    torch.testing.assert_close(states, torch.cat(last), atol=1e-12, rtol=0)


def test_the_state_goes_on_from_piece_to_piece() -> None:
    state, *inputs = drawn(2, 100)
    whole, end = gated_delta_rule(state, *inputs)
    found = []
    for begin, stop in ((0, 70), (70, 71), (71, 100)):
        out, state = gated_delta_rule(state, *(x[:, begin:stop] for x in inputs))
        found.append(out)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(state, end, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_it_equals_that_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule: Any = getattr(modeling_qwen3_next, name)
    state, q, k, v, log_decay, beta = (x.float() for x in drawn(2, 90))
    repeated = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (q, k))
    wanted, end = rule(*repeated, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)
    # They scale the queries inside.
    found, states = gated_delta_rule(state, q * KEY**-0.5, k, v, log_decay, beta)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(states, end, atol=5e-6, rtol=0)


@pytest.mark.parametrize("length", [1, 7])
def test_gradients_of_outputs_and_state(length: int) -> None:
    inputs = [x.requires_grad_() for x in drawn(1, length)]
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2]])[:, :length]
    assert torch.autograd.gradcheck(gated_delta_rule, inputs)
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, documents=documents), inputs)


def test_states_that_vanish_give_no_nan() -> None:
    """Decays of e^-200 underflow within a chunk."""
    state, q, k, v, log_decay, beta = drawn(1, 80)
    inputs = [x.float().requires_grad_() for x in (state, q, k, v, 100 * log_decay, beta)]
    out, end = gated_delta_rule(*inputs)
    gradients = torch.autograd.grad(out.sum() + end.sum(), inputs)
    assert all(found.isfinite().all() for found in (out, end, *gradients))
