"""Log-probabilities made from hidden states, chunk by chunk, against whole logits in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.model import IGNORE_INDEX
from sheepop.model.logits import LogitChunks, LossMemory, Places
from sheepop.model.loss import linear_cross_entropy, linear_log_probabilities

N, D, V = 12, 6, 9


def inputs(ignored: tuple[int, ...] = (0, 4, 5, 11)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels, and a weight for every position, of both signs."""
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, V))
    labels = torch.randint(V, (N,), generator=generator)
    labels[list(ignored)] = IGNORE_INDEX
    weighting = torch.randn(N, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, weighting


def by_formula(hidden: Tensor, weight: Tensor, labels: Tensor, soft_cap: float | None = None) -> Tensor:
    logits = hidden @ weight.t()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    found = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORE_INDEX, 0.0, found)


@pytest.mark.parametrize("chunk_rows", [1, 5, None])
@pytest.mark.parametrize("ignored", [(), (0, 4, 5, 11), tuple(range(N))])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_values_and_weighted_gradients_are_those_of_whole_logits(
    chunk_rows: int | None, ignored: tuple[int, ...], soft_cap: float | None
) -> None:
    hidden, weight, labels, weighting = inputs(ignored)
    expected = by_formula(hidden, weight, labels, soft_cap)
    of_expected = torch.autograd.grad(expected, (hidden, weight), weighting)
    chunk_bytes = None if chunk_rows is None else chunk_rows * V * 8
    found = linear_log_probabilities(hidden, weight, labels, soft_cap=soft_cap, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(found, expected)
    for _ in range(2):  # the second way back is like the first
        gradients = torch.autograd.grad(found, (hidden, weight), weighting, retain_graph=True)
        torch.testing.assert_close(gradients, of_expected)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradients_are_slopes(soft_cap: float | None) -> None:
    hidden, weight, labels, _ = inputs()
    assert torch.autograd.gradcheck(
        lambda x, w: linear_log_probabilities(x, w, labels, soft_cap=soft_cap, chunk_bytes=3 * V * 8), (hidden, weight)
    )


def preference(log_p: Tensor) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7) of rows 0 and 1, chosen, and 2 and 3, rejected; the reference is uniform."""
    margin = (log_p - torch.log(torch.tensor(1 / V))).sum(-1)
    return -F.logsigmoid(0.3 * (margin[:2] - margin[2:])).mean()


def clipped(log_p: Tensor) -> Tensor:
    """PPO's clipped ratio (Schulman et al. 2017, eq. 7), some of them beyond the clip."""
    advantages = torch.linspace(-1, 1, log_p.numel()).view_as(log_p)
    ratio = (log_p - (log_p.detach() + torch.linspace(-0.4, 0.4, log_p.numel()).view_as(log_p))).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


@pytest.mark.parametrize("objective", [preference, clipped])
def test_an_objective_on_top_has_the_gradients_of_whole_logits(objective: Callable[[Tensor], Tensor]) -> None:
    hidden, weight, labels, _ = inputs()
    rows, labels = hidden.view(4, 3, D), labels.view(4, 3)
    found = objective(linear_log_probabilities(rows, weight, labels, chunk_bytes=5 * V * 8))
    expected = objective(by_formula(rows, weight, labels))
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), gradients)


@pytest.mark.parametrize("way", ["autocast", "cast weight", "weights"])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_half_precision_products_are_summed_up_exactly(way: str, soft_cap: float | None) -> None:
    """Against float64 over the rounded inputs: what is left is the rounding of logits and of their gradients."""
    hidden, weight, labels, weighting = (
        tensor.detach().bfloat16().float() if tensor.is_floating_point() else tensor for tensor in inputs()
    )
    exact = tuple(tensor.double().requires_grad_() for tensor in (hidden, weight))
    expected = by_formula(*exact, labels, soft_cap)
    hidden = hidden if way == "autocast" else hidden.bfloat16()
    weight = weight.bfloat16() if way == "weights" else weight
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        cast = weight.detach().bfloat16() if way == "cast weight" else None
        found = linear_log_probabilities(
            hidden, weight, labels, weight_cast=cast, soft_cap=soft_cap, chunk_bytes=5 * V * 2
        )
    # Outside of autocast, as a training step goes backward.
    gradients = torch.autograd.grad(found, (hidden, weight), weighting)
    assert (found.dtype, *(one.dtype for one in gradients)) == (torch.float32, hidden.dtype, weight.dtype)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)
    for one, other in zip(gradients, torch.autograd.grad(expected, exact, weighting.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03)


def test_the_summed_loss_is_minus_the_sum() -> None:
    hidden, weight, labels, _ = inputs()
    of_sum = -linear_log_probabilities(hidden, weight, labels).sum()
    loss = linear_cross_entropy(hidden, weight, labels).objective
    torch.testing.assert_close(of_sum, loss)
    torch.testing.assert_close(
        torch.autograd.grad(of_sum, (hidden, weight)), torch.autograd.grad(loss, (hidden, weight))
    )


def test_a_head_that_is_also_the_embedding_gets_both_gradients_in_the_memory_given() -> None:
    _, weight, labels, weighting = inputs()
    ids = torch.arange(N) % V
    (expected,) = torch.autograd.grad(by_formula(F.embedding(ids, weight), weight, labels), weight, weighting)
    memory = LossMemory(gradient=torch.full((V, D), torch.nan, dtype=torch.float64))
    found = linear_log_probabilities(F.embedding(ids, weight), weight, labels, memory=memory)
    torch.testing.assert_close(torch.autograd.grad(found, weight, weighting), (expected,))
    assert memory.gradient is None


def test_logits_that_are_still_in_memory_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, weighting = inputs()
    expected = torch.autograd.grad(by_formula(hidden, weight, labels), (hidden, weight), weighting)
    computed, computes = [], LogitChunks.logits

    def counted(chunks: LogitChunks, hidden_RD: Tensor, rows: Places) -> Tensor:
        computed.append(len(hidden_RD))
        return computes(chunks, hidden_RD, rows)

    monkeypatch.setattr(LogitChunks, "logits", counted)
    memory = LossMemory()
    found = linear_log_probabilities(hidden, weight, labels, chunk_bytes=5 * V * 8, memory=memory)
    assert computed == [4, 4]  # eight labels
    first = torch.autograd.grad(found, (hidden, weight), weighting, retain_graph=True)
    assert computed == [4, 4, 4]  # one of the two chunks, in whose memory the gradients are now
    again = torch.autograd.grad(found, (hidden, weight), weighting)
    assert computed == [4, 4, 4, 4, 4]
    found = linear_log_probabilities(hidden, weight, labels, chunk_bytes=5 * V * 8, memory=memory)
    linear_log_probabilities(2 * hidden, weight, labels, chunk_bytes=5 * V * 8, memory=memory)
    computed.clear()
    overwritten = torch.autograd.grad(found, (hidden, weight), weighting)
    assert computed == [4, 4]
    for gradients in (first, again, overwritten):
        torch.testing.assert_close(gradients, expected)
        assert all(torch.equal(one, other) for one, other in zip(gradients, first, strict=True))


def test_no_tensor_is_larger_than_a_chunk_and_little_is_kept() -> None:
    """All logits would be 300 times 700; a chunk has 40 rows, and of a row one number is kept beside the inputs."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for tensor in found if isinstance(found, tuple | list) else (found,):
                if isinstance(tensor, Tensor):
                    self.size = max(self.size, tensor.numel())
            return found

    rows, size = 300, 700
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(size, 8, requires_grad=True)
    labels, kept = torch.randint(size, (rows,)), []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
    ):
        found = linear_log_probabilities(hidden, weight, labels, chunk_bytes=40 * size * 4)
        torch.autograd.grad(found.square().sum(), (hidden, weight))
    assert largest.size <= 40 * size
    fresh = [tensor for tensor in kept if tensor.data_ptr() not in (hidden.data_ptr(), weight.data_ptr())]
    assert max(tensor.numel() for tensor in fresh) == rows


def test_a_weight_that_was_changed_before_the_way_back_is_refused() -> None:
    hidden, weight, labels, weighting = inputs()
    found = linear_log_probabilities(hidden, weight, labels)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found, hidden, weighting)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        linear_log_probabilities(torch.zeros(2, 3, D), torch.zeros(V, D), torch.zeros(3, 2, dtype=torch.long))
