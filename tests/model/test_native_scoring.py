"""Scores of tokens by the native kernel, against whole logits in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.adapt.quantization import quantized
from sheepop.core.machine import compiler_command
from sheepop.model import native_scoring
from sheepop.model.head import Judged, OutputHead

pytestmark = pytest.mark.skipif(compiler_command() is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_scoring, "native_kernels_allowed", lambda: True)
    monkeypatch.setattr(native_scoring, "_PART", 512)


def head_of(weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None, soft_cap: float | None = None) -> OutputHead:
    head = OutputHead(weight_VD.shape[1], len(weight_VD), soft_cap, bias=bias_V is not None)
    head.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    if bias_V is not None:
        head.bias = torch.nn.Parameter(bias_V, requires_grad=False)
    return head


def in_float64(head: OutputHead, weight_VD: torch.Tensor, hidden_RD: torch.Tensor) -> torch.Tensor:
    logits_RV = hidden_RD.double() @ weight_VD.double().T
    if head.bias is not None:
        logits_RV += head.bias.double()
    return logits_RV if head.soft_cap is None else head.soft_cap * (logits_RV / head.soft_cap).tanh()


def check(found: Judged, logits_RV: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    log_p_RV = logits_RV.log_softmax(-1)
    own, best = log_p_RV[rows, tokens], log_p_RV.amax(-1)[rows]
    torch.testing.assert_close(found.logprobs.double(), own, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.best_logprobs.double(), best, rtol=1e-5, atol=1e-4)
    assert float((found.logprobs.double() - own).mean()) == pytest.approx(0, abs=1e-5)
    assert found.ranks.tolist() == ((log_p_RV[rows] > own[:, None]).sum(-1) + 1).tolist()
    assert found.is_likeliest.tolist() == (log_p_RV.argmax(-1)[rows] == tokens).tolist()


# Sizes that fill no group, no tile and no part; logits of a standard deviation of 3, a column with outliers.
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 7, 5), (13, 100, 1537), (64, 640, 3000)])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("biased", [False, True])
def test_tokens_are_judged_as_in_float64(
    rows: int, width: int, vocabulary: int, soft_cap: float | None, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(vocabulary, width, generator=generator)
    hidden = 3 * torch.randn(rows, width, generator=generator) / width**0.5
    hidden[:, 3] *= 20
    bias = torch.randn(vocabulary, generator=generator) if biased else None
    head = head_of(weight, bias, soft_cap)
    logits = in_float64(head, weight, hidden)
    likeliest, drawn = logits.argmax(-1), torch.randint(vocabulary, (rows,), generator=generator)
    tokens = torch.stack((likeliest, drawn), 1).flatten()
    places = torch.arange(rows).repeat_interleave(2)
    check(head.judge(hidden, tokens, places), logits, tokens, places)
    check(head.judge(hidden, drawn), logits, drawn, torch.arange(rows))


def test_ranks_among_nearly_equal_logits_are_those_of_float32() -> None:
    """Given logits that differ by less than the rounding of the integers, their order is still that of the floats."""
    torch.manual_seed(1)
    weight = torch.randn(1, 64).repeat(600, 1)
    weight[:, 0] += torch.randperm(600) * 1e-4
    hidden = torch.rand(20, 64) + 0.5
    tokens = torch.arange(20) * 7
    head = head_of(weight)
    logits = in_float64(head, weight, hidden)
    check(head.judge(hidden, tokens), logits, tokens, torch.arange(20))


@pytest.mark.parametrize("stored", ["int8", "int4", "bfloat16"])
def test_stored_weights_are_judged_part_by_part(stored: str) -> None:
    torch.manual_seed(2)
    weight, hidden = torch.randn(1100, 64), torch.randn(20, 64) / 2
    kept = weight.bfloat16() if stored == "bfloat16" else quantized(weight, stored)  # type: ignore[arg-type]
    head, tokens = head_of(kept), torch.randint(1100, (20,))
    hidden = hidden.to(kept.dtype)
    plain = kept if stored == "bfloat16" else kept.rows()  # type: ignore[attr-defined]
    check(head.judge(hidden, tokens), in_float64(head, plain, hidden), tokens, torch.arange(20))


def test_equally_likely_tokens_have_the_same_rank_and_the_first_is_the_likeliest() -> None:
    found = head_of(torch.zeros(2000, 8)).judge(torch.ones(3, 8), torch.tensor([0, 1, 1999]))
    assert found.is_likeliest.tolist() == [True, False, False]
    assert found.ranks.tolist() == [1, 1, 1]
    assert found.logprobs.tolist() == pytest.approx([-math.log(2000)] * 3)


def test_numbers_that_are_not_finite_or_very_large_or_small_are_computed_in_float32() -> None:
    torch.manual_seed(3)
    weight, hidden = torch.randn(600, 32), torch.randn(6, 32)
    hidden[1, 5], hidden[2, 5] = torch.nan, torch.inf
    hidden[3] *= 1e30
    hidden[4] *= 1e-25
    bias = torch.zeros(600)
    bias[100:] = -torch.inf
    tokens = torch.tensor([7, 7, 7, 7, 7, 500])
    head = head_of(weight, bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    found, expected = head.judge(hidden, tokens), logits.log_softmax(-1)
    torch.testing.assert_close(found.logprobs, expected[range(6), tokens], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found.logprobs[5] == -torch.inf
    assert found.ranks[5] == 101


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(4)
    head, hidden, tokens = head_of(torch.randn(3000, 64)), torch.randn(40, 64), torch.randint(3000, (40,))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(head.judge(hidden, tokens))
    torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_head_that_computes_more_than_a_product_is_judged_by_its_logits() -> None:
    class Doubled(OutputHead):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden)

    torch.manual_seed(5)
    head, hidden, tokens = Doubled(16, 600), torch.randn(20, 16), torch.randint(600, (20,))
    with torch.no_grad():
        check(head.judge(hidden, tokens), head(hidden).double(), tokens, torch.arange(20))
