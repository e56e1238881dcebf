"""Causal attention by products of blocks, against the equation written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.model.attention import products
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.attention.kernel import AttentionKind
from sheepop.model.attention.products import ProductsAttention, causal_products


def random_heads(
    rows: int, length: int, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((rows, heads, length, width), (rows, kv_heads, length, width), (rows, kv_heads, length, value_width))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def equation(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
    """Softmax over keys of the same document that are not in the future, one row and one query at a time."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows = []
    for row in range(q.shape[0]):
        outputs = []
        for t in range(q.shape[2]):
            first = 0
            if documents is not None:
                first = next(s for s in range(t + 1) if documents[row, s] == documents[row, t])
            scores = scale * (k[row, :, first : t + 1] @ q[row, :, t, :, None])[..., 0]
            outputs.append((scores.softmax(-1)[:, None] @ v[row, :, first : t + 1])[:, 0])
        rows.append(torch.stack(outputs, dim=1))
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(4, 4), (3, 5), (8, 2)]),
    queries=st.integers(1, 16),
    scores=st.integers(1, 2000),
    scale=st.floats(0.1, 2),
    cuts=st.none() | st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_equation_for_any_blocks(
    rows, length, heads, widths, queries, scores, scale, cuts
) -> None:
    documents = None
    if cuts is not None:
        drawn = torch.rand(rows, length, generator=torch.Generator().manual_seed(cuts))
        documents = (drawn < (cuts % 10) / 10).long().cumsum(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_QUERIES", queries)
        patch.setattr(products, "_SCORES", scores)
        inputs = random_heads(rows, length, *heads, *widths)
        expected = equation(*inputs, scale, documents)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        found = causal_products(*inputs, scale, documents).transpose(1, 2)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        for ours, theirs in zip(
            torch.autograd.grad((found * weights).sum(), inputs),
            torch.autograd.grad((expected * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


def test_it_is_an_operator_that_autograd_and_the_compiler_know() -> None:
    torch.library.opcheck(causal_products, (*random_heads(2, 9, 4, 2, 5, 3), 0.3))
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9])
    torch.library.opcheck(causal_products, (*random_heads(2, 9, 4, 2, 5, 3), 0.3, documents))


@pytest.fixture
def with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies bfloat16; others compute the same more slowly."""
    monkeypatch.setattr(products, "HAS_BFLOAT16_PRODUCTS", True)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.norm())


@pytest.mark.usefixtures("with_products")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_bfloat16_is_as_exact_as_its_rounding(packed, compiled) -> None:
    """Scores, weights and results are rounded to 8 bits, so errors of a few times 2^-9 are to be expected."""
    cuts = (70, 1, 33, 96) if packed else (200,)
    ids = torch.cat([torch.full((size,), number) for number, size in enumerate(cuts)])[None]
    kind = AttentionKind(dtype=torch.bfloat16, compiled=compiled)
    sight = kind.sight(200, document_ids=ids if packed else None)
    inputs = random_heads(1, 200, 4, 2, 16, 16, torch.bfloat16)
    exact = [part.detach().double().requires_grad_() for part in inputs]
    expected = equation(*exact, 0.25, ids)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights = weights.bfloat16()
    kernel = choose_kernel(kind, sight).kernel
    assert kernel.name == "products"
    found = kernel.prepare(kind, sight).attend(*inputs)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < 0.008
    ours = torch.autograd.grad(found, inputs, weights)
    for gradient, wanted in zip(ours, torch.autograd.grad(expected, exact, weights.double()), strict=True):
        assert relative_error(gradient, wanted) < 0.012


@pytest.mark.usefixtures("with_products")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": torch.float32}, "is for bfloat16 on a CPU, not for float32 on cpu"),
        ({"dtype": torch.float16}, "is for bfloat16 on a CPU, not for float16 on cpu"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"window": 3, "sinks": True}, "has no sinks and no windows"),
    ],
)
def test_other_data_types_and_dropout_take_another_kernel(settings, reason) -> None:
    kind = AttentionKind(**{"dtype": torch.bfloat16, **settings})
    assert dict(choose_kernel(kind, kind.sight(8)).passed_over)["products"] == reason


def test_a_large_score_is_a_weight_of_one_and_no_overflow() -> None:
    q, k, v = (part.detach() for part in random_heads(1, 5, 1, 1, 4, 4, torch.bfloat16))
    k[0, 0, 1] = q[0, 0, 3] * 1e20
    found = ProductsAttention().attend(q, k, v)
    assert found.isfinite().all()
    assert found[0, 0, 3].tolist() == v[0, 0, 1].tolist()
