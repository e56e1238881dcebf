"""The output head, against whole logits in float64."""

from __future__ import annotations

import pytest
import torch

from sheepop.model.head import OutputHead

V, D = 19, 8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_loss_log_probabilities_and_scores_are_those_of_the_logits(soft_cap: float | None, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    head = OutputHead(D, V, soft_cap, bias=bias)
    if bias:
        torch.nn.init.normal_(head.bias, generator=generator)
    hidden = 3 * torch.randn(2, 5, D, generator=generator)
    labels = torch.randint(V, (2, 5), generator=generator)
    labels[0, 3] = -100
    logits = hidden.double() @ head.weight.detach().double().T
    if bias:
        logits = logits + head.bias.detach().double()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    torch.testing.assert_close(head(hidden).double(), logits, rtol=1e-5, atol=1e-5)
    expected = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(labels == -100, 0.0, expected)
    torch.testing.assert_close(head.log_probabilities(hidden, labels).double(), expected, rtol=1e-5, atol=1e-5)
    assert head.cross_entropy(hidden, labels).cross_entropy.item() == pytest.approx(-expected.sum().item(), rel=1e-5)
    loss, right = head.score(hidden, labels)
    assert loss.item() == pytest.approx(-expected.sum().item(), rel=1e-5)
    assert right.item() == (logits.argmax(-1) == labels).sum().item()


@pytest.mark.parametrize("cast", [False, True])
def test_gradients_with_a_bias_are_those_of_the_whole_logits(cast: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    head = OutputHead(D, V, bias=True)
    torch.nn.init.normal_(head.bias, generator=generator)
    if cast:
        head.cast = head.weight.detach().clone()
    hidden = torch.randn(2, 5, D, generator=generator, requires_grad=True)
    labels = torch.randint(V, (2, 5), generator=generator)
    head.cross_entropy(hidden, labels).objective.backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight, head.bias)]
    logits = exact[0] @ exact[1].T + exact[2]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for found, expected in zip((hidden, head.weight, head.bias), exact, strict=True):
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)
