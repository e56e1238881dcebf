"""The output head, against whole logits in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.model import logits
from sheepop.model.accounting.live_bytes import LiveBytes
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
    whole = hidden.double() @ head.weight.detach().double().T
    if bias:
        whole = whole + head.bias.detach().double()
    if soft_cap is not None:
        whole = soft_cap * torch.tanh(whole / soft_cap)
    torch.testing.assert_close(head(hidden).double(), whole, rtol=1e-5, atol=1e-5)
    expected = torch.log_softmax(whole, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(labels == -100, 0.0, expected)
    torch.testing.assert_close(head.log_probabilities(hidden, labels).double(), expected, rtol=1e-5, atol=1e-5)
    assert head.cross_entropy(hidden, labels).cross_entropy.item() == pytest.approx(-expected.sum().item(), rel=1e-5)
    loss, right = head.score(hidden, labels)
    assert loss.item() == pytest.approx(-expected.sum().item(), rel=1e-5)
    assert right.item() == (whole.argmax(-1) == labels).sum().item()


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


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * 7 * 4, 1 << 20])
def test_tokens_are_judged_as_in_float64_however_the_logits_are_cut(
    monkeypatch: pytest.MonkeyPatch, soft_cap: float | None, chunk_bytes: int
) -> None:
    monkeypatch.setitem(logits._CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setitem(logits._BLOCK_BYTES, "cpu", chunk_bytes // 2)
    torch.manual_seed(3)
    head, hidden = OutputHead(5, 7, soft_cap), 3 * torch.randn(10, 5)
    rows, tokens = torch.tensor([0, 0, 0, 2, 5, 5, 9]), torch.tensor([6, 6, 0, 3, 1, 2, 4])
    whole = hidden.double() @ head.weight.detach().double().T
    whole = whole if soft_cap is None else soft_cap * (whole / soft_cap).tanh()
    for found, where, ids in (
        (head.judge(hidden, tokens, rows), rows, tokens),
        (head.judge(hidden[:7], tokens), torch.arange(7), tokens),
    ):
        for number, (row, token) in enumerate(zip(where.tolist(), ids.tolist(), strict=True)):
            p = whole[row].exp() / whole[row].exp().sum()
            assert float(found.logprobs[number]) == pytest.approx(math.log(p[token]), rel=1e-5)
            assert int(found.ranks[number]) == 1 + sum(bool(other > p[token]) for other in p)
            assert float(found.best_logprobs[number]) == pytest.approx(math.log(max(p)), rel=1e-5)
            assert bool(found.is_likeliest[number]) == (int(p.argmax()) == token)


def test_the_first_of_equally_likely_tokens_is_the_likeliest() -> None:
    head = OutputHead(2, 4)
    with torch.no_grad():
        head.weight.zero_()
    found = head.judge(torch.ones(2, 2), torch.tensor([0, 1]))
    assert found.is_likeliest.tolist() == [True, False]
    assert found.ranks.tolist() == [1, 1]
    assert found.logprobs.tolist() == pytest.approx([-math.log(4)] * 2)


def test_judging_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits._CHUNK_BYTES, "cpu", 20 * 5000 * 4)
    monkeypatch.setitem(logits._BLOCK_BYTES, "cpu", 2 * 5000 * 4)
    head, hidden, tokens = OutputHead(4, 5000), torch.randn(400, 4), torch.arange(400)
    with torch.no_grad(), LiveBytes() as live:
        head.judge(hidden, tokens)
    # A chunk of 20 rows, and a few copies of blocks of 2, of 400 rows of logits; the rest are weights and states.
    assert live.peak < (20 + 4 * 2) * 5000 * 4 + head.weight.nbytes + 20 * hidden.nbytes
