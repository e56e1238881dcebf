"""The loss made from hidden states, chunk by chunk, against the plain one in float64 and against formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.model import IGNORE_INDEX, LossTerms
from sheepop.model.logits import LossMemory, score_tokens
from sheepop.model.loss import linear_cross_entropy, linear_log_probabilities

N, D, V = 12, 6, 9


def inputs(dtype: torch.dtype = torch.float64, ignored: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (N,), generator=generator)
    labels[list(ignored)] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def by_formula(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, smoothing: float, soft_cap: float | None = None
) -> Tensor:
    """The objective as it is written down, over whole logits."""
    kept = labels != IGNORE_INDEX
    logits = (hidden @ weight.t())[kept]
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    log_p = torch.log_softmax(logits, -1)
    target = torch.full_like(log_p, smoothing / V).scatter_add(
        1, labels[kept][:, None], torch.full_like(log_p[:, :1], 1 - smoothing)
    )
    return -(target * log_p).sum() + z_loss * torch.logsumexp(logits, -1).square().sum()


@pytest.mark.parametrize("chunk_bytes", [1, 3 * V * 8, 5 * V * 8, None])
@pytest.mark.parametrize("ignored", [(), (0, 4, 5, 11), tuple(range(N))])
def test_loss_and_gradients_are_those_of_whole_logits(chunk_bytes: int | None, ignored: tuple[int, ...]) -> None:
    hidden, weight, labels = inputs(ignored=ignored)
    expected = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    of_hidden, of_weight = torch.autograd.grad(expected, (hidden, weight))
    sums = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes)
    # An incoming gradient that is not 1, as when the sum is divided by the tokens of a step.
    found = torch.autograd.grad(0.25 * sums.objective, (hidden, weight))
    torch.testing.assert_close(sums.objective, expected)
    torch.testing.assert_close(sums.cross_entropy, expected.detach())
    torch.testing.assert_close(found, (0.25 * of_hidden, 0.25 * of_weight))


@pytest.mark.parametrize("soft_cap", [None, 1.5, 30.0])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (0.3, 0.25)])
def test_added_terms_and_the_soft_cap_follow_their_formulas(
    z_loss: float, smoothing: float, soft_cap: float | None
) -> None:
    hidden, weight, labels = inputs(ignored=(2, 3))
    expected = by_formula(hidden, weight, labels, z_loss, smoothing, soft_cap)
    sums = linear_cross_entropy(
        hidden, weight, labels, LossTerms(z_loss, smoothing), soft_cap=soft_cap, chunk_bytes=4 * V * 8
    )
    torch.testing.assert_close(sums.objective, expected)
    torch.testing.assert_close(sums.cross_entropy, by_formula(hidden, weight, labels, 0.0, 0.0, soft_cap).detach())
    torch.testing.assert_close(
        torch.autograd.grad(sums.objective, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))
    )
    assert not sums.cross_entropy.requires_grad


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradients_are_the_slopes_of_the_loss(soft_cap: float | None) -> None:
    """Central differences of every entry in float64, without autograd."""
    hidden, weight, labels = inputs(ignored=(1,))
    terms = LossTerms(z_loss=0.05, label_smoothing=0.2)
    loss = linear_cross_entropy(hidden, weight, labels, terms, soft_cap=soft_cap).objective
    gradients = torch.autograd.grad(loss, (hidden, weight))
    step = 1e-6
    for tensor, gradient in zip((hidden, weight), gradients, strict=True):
        for place in torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape)).tolist():
            values = []
            for change in (step, -step):
                moved = tensor.detach().clone()
                moved[tuple(place)] += change
                pair = (moved, weight) if tensor is hidden else (hidden, moved)
                values.append(linear_cross_entropy(*pair, labels, terms, soft_cap=soft_cap).objective.item())
            assert gradient[tuple(place)].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-6)


@given(
    rows=st.integers(1, 40),
    ignored=st.sets(st.integers(0, 39)),
    chunk_rows=st.integers(1, 50),
    smoothing=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=40, deadline=None)
def test_the_size_of_a_chunk_makes_no_difference(
    rows: int, ignored: set[int], chunk_rows: int, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (rows,), generator=generator)
    labels[[place for place in ignored if place < rows]] = IGNORE_INDEX
    results = []
    for chunk_bytes in (None, chunk_rows * V * 8):
        sums = linear_cross_entropy(
            hidden, weight, labels, LossTerms(label_smoothing=smoothing), chunk_bytes=chunk_bytes
        )
        results.append((sums.objective, sums.cross_entropy, *torch.autograd.grad(sums.objective, (hidden, weight))))
    torch.testing.assert_close(*results)


def test_calls_share_memory_and_give_what_they_give_without() -> None:
    memory = LossMemory()
    for seed, chunk_bytes in ((0, 5 * V * 8), (1, 3 * V * 8), (2, None)):
        hidden, weight, labels = inputs()
        hidden = (hidden.detach() + seed).requires_grad_()
        memory.gradient = kept = torch.full((V, D), torch.nan, dtype=torch.float64)
        expected = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes)
        of_expected = torch.autograd.grad(expected.objective, (hidden, weight))
        found = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes, memory=memory)
        of_found = torch.autograd.grad(found.objective, (hidden, weight))
        assert found == expected
        assert all(torch.equal(one, other) for one, other in zip(of_found, of_expected, strict=True))
        assert of_found[1].data_ptr() == kept.data_ptr()
        # It is the caller's now: the next call makes another.
        assert memory.gradient is None
        again = linear_cross_entropy(hidden, weight, labels, memory=memory)
        assert torch.autograd.grad(again.objective, weight)[0].data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("objective", ["loss", "log_probabilities"])
def test_micro_batches_add_to_one_gradient_in_place(objective: str, soft_cap: float | None) -> None:
    memory, weight = LossMemory(), inputs()[1]
    memory.weight = weight
    whole, parts = torch.zeros((), dtype=torch.float64), []
    for number, ignored in enumerate([(), (0, 4, 5, 11), tuple(range(N)), (3,)]):
        hidden, _, labels = inputs(ignored=ignored)
        logits = hidden @ weight.t()
        capped = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
        whole = whole + (0.25 + number) * F.cross_entropy(capped, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        own = hidden.detach().requires_grad_()
        how: Any = {"chunk_bytes": 5 * V * 8, "memory": memory, "soft_cap": soft_cap}
        if objective == "loss":
            found = linear_cross_entropy(own, weight, labels, **how).objective
        else:
            found = -linear_log_probabilities(own, weight, labels, **how).sum()
        torch.autograd.backward((0.25 + number) * found)
        assert weight.grad is not None
        parts.append((hidden, own.grad, weight.grad.data_ptr()))
    of_weight, *of_hidden = torch.autograd.grad(whole, (weight, *(hidden for hidden, _, _ in parts)))
    torch.testing.assert_close(weight.grad, of_weight)
    torch.testing.assert_close([found for _, found, _ in parts], of_hidden)
    assert len({place for _, _, place in parts}) == 1


@pytest.mark.parametrize("fitting", ["shape", "dtype"])
def test_memory_that_does_not_fit_is_not_used(fitting: str) -> None:
    hidden, weight, labels = inputs()
    rows, dtype = (V, torch.float32) if fitting == "shape" else (V + 1, torch.float64)
    memory = LossMemory(torch.zeros(2, rows, dtype=dtype), torch.zeros(rows, D, dtype=dtype))
    found = linear_cross_entropy(hidden, weight, labels, memory=memory)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(torch.autograd.grad(found.objective, weight), torch.autograd.grad(expected, weight))


def test_a_head_that_is_also_the_embedding_gets_both_gradients() -> None:
    _, weight, labels = inputs()
    ids = torch.arange(N) % V

    def total(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, weight)
        return gradient

    expected = total(F.cross_entropy(F.embedding(ids, weight) @ weight.t(), labels, reduction="sum"))
    torch.testing.assert_close(
        total(linear_cross_entropy(F.embedding(ids, weight), weight, labels).objective), expected
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["autocast", "cast weight", "weights"])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_half_precision_products_are_summed_up_exactly(dtype: torch.dtype, way: str, soft_cap: float | None) -> None:
    """Against float64 over the rounded inputs: what is left is the rounding of logits and of their gradients."""
    hidden, weight, labels = inputs(ignored=(7,))
    hidden, weight = (tensor.detach().to(dtype).float() for tensor in (hidden, weight))
    exact_hidden, exact_weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    expected = by_formula(exact_hidden, exact_weight, labels, 0.0, 0.0, soft_cap)
    gradients = torch.autograd.grad(expected, (exact_hidden, exact_weight))
    if way != "autocast":
        hidden = hidden.to(dtype)
    if way == "weights":
        weight = weight.to(dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=way == "autocast"):
        cast = weight.detach().to(dtype) if way == "cast weight" else None
        sums = linear_cross_entropy(hidden, weight, labels, weight_cast=cast, soft_cap=soft_cap, chunk_bytes=5 * V * 2)
    found = torch.autograd.grad(sums.objective, (hidden, weight))
    assert [gradient.dtype for gradient in found] == [hidden.dtype, weight.dtype]
    assert sums.objective.dtype == torch.float32
    assert sums.objective.item() == pytest.approx(expected.item(), rel=2e-3)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03)


def test_logits_far_from_zero_keep_the_loss_finite() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    sums = linear_cross_entropy(hidden, weight, torch.tensor([1, 1]))
    torch.autograd.backward(sums.objective)
    assert sums.objective.item() == 1000.0
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[1.0], [0.0]]


def test_logits_far_beyond_the_soft_cap_stay_at_it_without_a_gradient() -> None:
    hidden = torch.tensor([[1e4]], requires_grad=True)
    sums = linear_cross_entropy(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1]), soft_cap=3.0)
    torch.autograd.backward(sums.objective)
    assert sums.objective.item() == pytest.approx(math.log(1 + math.exp(6.0)))
    assert hidden.grad is not None
    assert hidden.grad.item() == 0.0


@pytest.mark.parametrize("soft_cap", [None, 0.8])
def test_scores_are_the_summed_loss_and_the_right_guesses(soft_cap: float | None) -> None:
    hidden, weight, labels = inputs(ignored=(0, 6))
    logits = hidden @ weight.t()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    loss, correct = score_tokens(hidden.view(3, 4, D), weight, labels.view(3, 4), soft_cap=soft_cap)
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum").item()
    )
    assert correct.item() == sum(
        int(row.argmax()) == label for row, label in zip(logits, labels.tolist(), strict=True) if label >= 0
    )


def test_a_uniform_prediction_costs_the_logarithm_of_the_vocabulary() -> None:
    sums = linear_cross_entropy(torch.zeros(2, 3), torch.ones(V, 3), torch.tensor([0, 5]), LossTerms(z_loss=0.1))
    assert sums.cross_entropy.item() == pytest.approx(2 * math.log(V))
    assert sums.objective.item() == pytest.approx(2 * math.log(V) + 0.2 * math.log(V) ** 2)


def test_gradients_are_handed_out_once() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels).objective
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels"),
    [((2, 3, D), (V, D), (3, 2)), ((4, D), (V, D + 1), (4,)), ((4, D), (V,), (4,))],
)
def test_shapes_that_do_not_fit_are_refused(
    hidden: tuple[int, ...], weight: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"do(es)? not fit"):
        linear_cross_entropy(torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels, dtype=torch.long))
