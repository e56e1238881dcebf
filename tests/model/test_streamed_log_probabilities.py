"""Log-probabilities under a frozen output projection, a part of the vocabulary at a time, against whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.model import IGNORE_INDEX, streamed_log_probabilities
from sheepop.model.loss import linear_cross_entropy, linear_log_probabilities

N, D, K, V = 11, 6, 2, 45


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens of the vocabulary and four rows at a time, so that the last of both are fewer."""
    monkeypatch.setattr(streamed_log_probabilities, "_PART", 10 * D)
    monkeypatch.setattr(streamed_log_probabilities, "_ROWS", 4)


def inputs(ignored: tuple[int, ...] = (0, 4, 5, 10)) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, `low`, weight, `up`, labels, and a weight for every position, of both signs."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((N, D), (N, K), (V, D), (V, K), (N,))
    hidden, low, weight, up, weighting = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes
    )
    labels = torch.randint(V, (N,), generator=generator)
    labels[list(ignored)] = IGNORE_INDEX
    return hidden.requires_grad_(), low.requires_grad_(), weight, up, labels, weighting


def by_formula(logits: Tensor, labels: Tensor, soft_cap: float | None = None) -> Tensor:
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    found = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORE_INDEX, 0.0, found)


@pytest.mark.parametrize("ignored", [(), (0, 4, 5, 10), tuple(range(N))])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("has_factors", [False, True])
def test_values_and_weighted_gradients_are_those_of_whole_logits(
    ignored: tuple[int, ...], soft_cap: float | None, has_factors: bool
) -> None:
    hidden, low, weight, up, labels, weighting = inputs(ignored)
    how: dict[str, Any] = {"soft_cap": soft_cap, "added": (low, up) if has_factors else None}
    learning = (hidden, low) if has_factors else (hidden,)
    logits = hidden @ weight.t() + (low @ up.t() if has_factors else 0)
    expected = by_formula(logits, labels, soft_cap)
    of_expected = torch.autograd.grad(expected, learning, weighting, retain_graph=True)
    found = linear_log_probabilities(hidden, weight, labels, **how)
    torch.testing.assert_close(found, expected)
    for _ in range(2):  # the second way back is like the first
        gradients = torch.autograd.grad(found, learning, weighting, retain_graph=True)
        torch.testing.assert_close(gradients, of_expected)
    sums = linear_cross_entropy(hidden, weight, labels, **how)
    torch.testing.assert_close(sums.objective, -expected.sum())
    assert sums.cross_entropy == sums.objective and not sums.cross_entropy.requires_grad
    of_sum = torch.autograd.grad(expected.sum(), learning)
    torch.testing.assert_close(torch.autograd.grad(-sums.objective, learning), of_sum)


@pytest.mark.parametrize("is_descending", [False, True])
def test_logits_of_any_size_and_order_do_not_overflow(is_descending: bool) -> None:
    logits = torch.arange(V).double().mul_(200).sort(descending=is_descending).values  # up to 8,800; e^710 overflows
    labels = torch.arange(V)
    with torch.no_grad():
        found = linear_log_probabilities(torch.ones(V, 1).double(), logits[:, None], labels)
    torch.testing.assert_close(found, logits - logits.max())  # all others are nothing beside the largest


def test_half_precision_sums_in_single_precision() -> None:
    hidden, _, weight, _, labels, weighting = inputs()
    weight, rounded = weight.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    expected = by_formula(rounded.double() @ weight.double().t(), labels)
    found = linear_log_probabilities(rounded, weight, labels)
    assert found.dtype == torch.float32
    # A logit of at most 8 rounds by 2^-6 at most, and both it and the largest ones do.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2**-5)
    (of_expected,) = torch.autograd.grad(expected, rounded, weighting)
    (of_found,) = torch.autograd.grad(found, rounded, weighting.float())
    torch.testing.assert_close(of_found, of_expected, rtol=0.05, atol=0.05)


def test_no_tensor_is_as_large_as_the_logits_of_all_tokens() -> None:
    hidden, _, weight, _, labels, weighting = inputs(())
    sizes = []

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in (found,) if isinstance(each, Tensor))
            return found

    with Sizes():
        linear_log_probabilities(hidden, weight, labels).backward(weighting)
    assert max(sizes) == weight.numel() < N * V
