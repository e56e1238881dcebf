"""Attention within documents, in each of its forms, against slow loops and against the documents alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.model.accounting.live_bytes import tensors_of
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.attention.fused import Fused, FusedAttention
from sheepop.model.attention.kernel import Attending, AttentionKind, Score
from sheepop.model.attention.segments import Cut, OperatorAttention, Segments, SegmentsAttention
from sheepop.model.attention.sight import number_documents


@st.composite
def packed_rows(draw: st.DrawFn, longest: int = 40) -> Tensor:
    """Document ids of rows with random cuts; ids need not rise, and an id may come again in a later document."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    cuts = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    numbers = torch.tensor(cuts).long().cumsum(1)
    return numbers % draw(st.sampled_from([2, 3, length + 1]))


def slow_numbers(document_ids: Tensor) -> list[list[int]]:
    rows = []
    for ids in document_ids.tolist():
        numbers = [0]
        for before, now in itertools.pairwise(ids):
            numbers.append(numbers[-1] + (before != now))
        rows.append(numbers)
    return rows


def slow_allowed(document_ids: Tensor, window: int | None = None) -> np.ndarray:
    numbers = slow_numbers(document_ids)
    length = len(numbers[0])
    reach = length if window is None else window
    return np.array(
        [
            [[s <= t and t - s < reach and row[s] == row[t] for s in range(length)] for t in range(length)]
            for row in numbers
        ]
    )


def random_heads(rows: int, length: int, heads: int, kv_heads: int, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    shapes = ((rows, heads, length, width), (rows, kv_heads, length, width), (rows, kv_heads, length, width))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, allowed: np.ndarray, slopes: Tensor | None = None) -> Tensor:
    """Equation 1 written out in float64, every entry of the T times T scores."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) / q.shape[3] ** 0.5
    if slopes is not None:
        places = torch.arange(q.shape[2])
        scores = scores - slopes[:, None, None] * (places[:, None] - places).abs()
    scores = scores.masked_fill(~torch.from_numpy(allowed)[:, None], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


Slopes = Tensor | None


def dense_form(ids: Tensor, window: int | None = None, slopes: Slopes = None) -> Attending:
    kind = AttentionKind(window=window, slopes=slopes)
    return Fused().prepare(kind, kind.sight(ids.shape[1], document_ids=ids))


def segments_form(ids: Tensor, window: int | None = None, slopes: Slopes = None) -> Attending:
    kind = AttentionKind(window, slopes)
    sight = kind.sight(ids.shape[1], document_ids=ids)
    kernel = choose_kernel(kind, sight).kernel
    assert isinstance(kernel, Segments)
    return kernel.prepare(kind, sight)


def operator_form(ids: Tensor) -> Attending:
    """As for a compiled network; it knows neither windows nor slopes."""
    kind = AttentionKind(compiled=True)
    sight = kind.sight(ids.shape[1], document_ids=ids)
    kernel = choose_kernel(kind, sight).kernel
    assert isinstance(kernel, Segments)
    return kernel.prepare(kind, sight)


FORMS: dict[str, Callable[..., Attending]] = {
    "segments": segments_form,
    "operator": operator_form,
    "dense": dense_form,
}


@settings(max_examples=60, deadline=None)
@given(
    document_ids=packed_rows(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    form=st.sampled_from([*FORMS]),
    window=st.none() | st.integers(1, 45),
    sloping=st.booleans(),
)
@example(document_ids=torch.zeros(1, 16).long(), heads=(1, 1), form="segments", window=15, sloping=False)
def test_values_and_gradients_equal_the_equation_for_any_cuts(document_ids, heads, form, window, sloping) -> None:
    rows, length = document_ids.shape
    inputs = random_heads(rows, length, *heads)
    reach = None if form == "operator" else window
    slopes = torch.linspace(0.05, 0.9, heads[0], dtype=torch.float64) if sloping and form != "operator" else None
    expected = reference(*inputs, slow_allowed(document_ids, reach), slopes)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    settings = () if form == "operator" else (reach, slopes)
    found = FORMS[form](document_ids, *settings).attend(*inputs)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@settings(max_examples=100, deadline=None)
@given(document_ids=packed_rows(longest=80))
def test_every_place_stands_in_one_segment_behind_the_places_of_its_document(document_ids) -> None:
    segments = Cut.of(number_documents(document_ids))
    rows, length = document_ids.shape
    numbers = slow_numbers(document_ids)
    places = iter(segments.gather.tolist())
    seen: list[int] = []
    for count, padded in segments.groups:
        for _ in range(count):
            segment = [next(places) for _ in range(padded)]
            row, start = divmod(segment[0], length)
            size = numbers[row][start:].count(numbers[row][start])
            assert padded - size < 16
            assert segment == [segment[0] + min(offset, size - 1) for offset in range(padded)]
            seen += segment[:size]
    assert next(places, None) is None
    assert sorted(seen) == list(range(rows * length))
    assert segments.gather[segments.scatter].tolist() == list(range(rows * length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["segments", "operator"])
def test_a_document_of_a_row_equals_the_document_alone(form, dtype) -> None:
    cuts = (70, 1, 33, 96)
    ids = torch.cat([torch.full((size,), number) for number, size in enumerate(cuts)])[None]
    q, k, v = (heads.detach().to(dtype) for heads in random_heads(1, 200, 4, 2, width=16))
    found = FORMS[form](ids).attend(q, k, v)
    for part, *alone in zip(*(heads.split(cuts, 2) for heads in (found, q, k, v)), strict=True):
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(part, FusedAttention(is_causal=True).attend(*alone), atol=tolerance, rtol=0)


def test_dropout_leaves_the_mean_and_crosses_no_boundary() -> None:
    """Over many draws dropout keeps the mean; a document's result does not hear of other documents in any draw."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    q, k, v = (heads.detach() for heads in random_heads(1, 8, 2, 2))
    kind = AttentionKind(dropout=0.5)
    attending = Segments().prepare(kind, kind.sight(8, document_ids=ids))
    exact, dropping = attending.attend(q, k, v), Score(dropout=0.5)
    torch.manual_seed(0)
    draws = torch.stack([attending.attend(q, k, v, dropping) for _ in range(2000)])
    assert (draws[0] != exact).any()
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error + 1e-12).all()
    changed = v.clone()
    changed[:, :, 3:7] += 100.0
    torch.manual_seed(1)
    before = attending.attend(q, k, v, dropping)
    torch.manual_seed(1)
    after = attending.attend(q, k, changed, dropping)
    assert torch.equal(after[:, :, [0, 1, 2, 7]], before[:, :, [0, 1, 2, 7]])


def test_the_operator_refuses_dropout() -> None:
    q, k, v = random_heads(1, 4, 1, 1)
    with pytest.raises(ValueError, match="has no dropout in compiled code"):
        OperatorAttention(torch.zeros(1, 4).long()).attend(q, k, v, Score(dropout=0.1))


def test_no_mask_of_all_pairs_is_built_for_documents() -> None:
    attending = segments_form(torch.arange(64)[None] // 9)
    assert isinstance(attending, SegmentsAttention)
    assert max(tensor.numel() for tensor in tensors_of(attending)) <= 64 * 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sinks": True}, "has no sinks"),
        ({"compiled": True, "dropout": 0.1}, "has no dropout, no windows and no distances in a network compiled"),
        ({"compiled": True, "window": 3}, "has no dropout, no windows and no distances in a network compiled"),
        ({"compiled": True, "head_dim": 8, "value_dim": 4}, "is compiled only for values as wide as keys"),
    ],
)
def test_what_segments_cannot_do_is_left_to_other_kernels(settings, reason) -> None:
    kind = AttentionKind(**settings)
    choice = choose_kernel(kind, kind.sight(8, document_ids=torch.arange(8)[None] // 5))
    assert choice.kernel.name == "fused"
    assert dict(choice.passed_over)["segments"].startswith(reason)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What other tests compiled counts towards a limit, and so does what this one does."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting_backend(frames: list[Any]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames.append(graph)
        return graph.forward

    return backend


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_network_is_not_made_anew_for_other_documents(toy_network) -> None:
    model = toy_network(max_seq_len=24)
    frames: list[Any] = []
    compiled = torch.compile(model, backend=counting_backend(frames), fullgraph=True)
    for ids, documents in batches(5):
        torch.testing.assert_close(
            compiled(ids, document_ids=documents), model(ids, document_ids=documents), atol=1e-5, rtol=0
        )
    assert len(frames) == 1


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, and documents that begin at other places in every batch."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(29, (2, 24), generator=generator)
        yield ids, (torch.rand(2, 24, generator=generator) < 0.2).long().cumsum(1)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, 1),
        ({"position_encoding": "alibi"}, 1),
        ({"position_encoding": "rope", "sliding_window": 5}, 1),
        # Layers with a window have another kind of mask, and are other code, than those without.
        ({"position_encoding": "rope", "sliding_window": 5, "sliding_layers": [1, 3]}, 2),
        ({"attention_soft_cap": 3.0}, 1),
        ({"attention_sinks": True, "value_head_dim": 4}, 1),
        ({"dropout": 0.1}, 1),
        # So are layers with experts.
        ({"experts": {"count": 4, "layers": [0, 2]}}, 2),
    ],
    ids=str,
)
def test_compiled_blocks_are_not_made_anew_for_other_documents(toy_network, monkeypatch, settings, kinds) -> None:
    """One compilation for all layers of a kind and all batches, forward and backward."""
    model = toy_network(max_seq_len=24, num_layers=4, **settings).to(torch.bfloat16).train()
    frames: list[Any] = []
    backend, compile_in_place = counting_backend(frames), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_in_place(self, backend=backend))
    model.compile_blocks()
    for ids, documents in batches(4):
        model(ids, document_ids=documents).float().square().sum().backward()
    assert len(frames) == kinds
