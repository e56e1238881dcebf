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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from sheepop.model.attention import attend
from sheepop.model.block_attention import block_mask
from sheepop.model.documents import Segments, number_documents
from sheepop.model.mask import AttentionKind, AttentionMask, attention_mask


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


def dense_form(ids: Tensor, window: int | None = None, slopes: Slopes = None) -> AttentionMask:
    length, kind = ids.shape[1], AttentionKind(window=window, slopes=slopes)
    return attention_mask(length, length, document_ids=ids, key_mask=torch.ones_like(ids).bool(), kind=kind)


def segments_form(ids: Tensor, window: int | None = None, slopes: Slopes = None) -> AttentionMask:
    mask = attention_mask(ids.shape[1], ids.shape[1], document_ids=ids, kind=AttentionKind(window, slopes))
    assert isinstance(mask.documents, Segments)
    return mask


FORMS: dict[str, Callable[..., AttentionMask]] = {
    "segments": segments_form,
    # The operator knows neither windows nor slopes.
    "operator": lambda ids: AttentionMask(documents=number_documents(ids)),
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
    mask = FORMS[form](document_ids) if form == "operator" else FORMS[form](document_ids, reach, slopes)
    found = attend(*inputs, mask)
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
    segments = Segments.of(number_documents(document_ids))
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
    found = attend(q, k, v, FORMS[form](ids))
    for part, *alone in zip(*(heads.split(cuts, 2) for heads in (found, q, k, v)), strict=True):
        size = part.shape[2]
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(part, attend(*alone, attention_mask(size, size)), atol=tolerance, rtol=0)


def test_dropout_leaves_the_mean_and_crosses_no_boundary() -> None:
    """Over many draws dropout keeps the mean; a document's result does not hear of other documents in any draw."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    q, k, v = (heads.detach() for heads in random_heads(1, 8, 2, 2))
    mask = attention_mask(8, 8, document_ids=ids, kind=AttentionKind(dropout=0.5))
    exact = attend(q, k, v, mask)
    torch.manual_seed(0)
    draws = torch.stack([attend(q, k, v, mask, 0.5) for _ in range(2000)])
    assert (draws[0] != exact).any()
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error + 1e-12).all()
    changed = v.clone()
    changed[:, :, 3:7] += 100.0
    torch.manual_seed(1)
    before = attend(q, k, v, mask, 0.5)
    torch.manual_seed(1)
    after = attend(q, k, changed, mask, 0.5)
    assert torch.equal(after[:, :, [0, 1, 2, 7]], before[:, :, [0, 1, 2, 7]])


def marked(numbers: Tensor, indices: Tensor) -> Tensor:
    """Blocks as a boolean matrix, from how many there are in each row and which."""
    columns = torch.arange(indices.shape[-1])
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), columns < numbers[..., None])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_blocks_for_the_gpu_are_those_that_torch_finds_entry_by_entry(data) -> None:
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 700))
    begins = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        begins[row, data.draw(st.lists(st.integers(0, length - 1), max_size=8))] = 1
    numbers = number_documents(begins.cumsum(1))
    window = data.draw(st.none() | st.integers(1, 800))
    reach = length if window is None else window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < reach) & (numbers[batch, key] == numbers[batch, query])

    ours = block_mask(length, numbers, window)
    theirs = create_block_mask(visible, rows, None, length, length, device="cpu")
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE == (128, 128)
    assert ours.seq_lengths == theirs.seq_lengths

    def blocks(mask: BlockMask) -> tuple[Tensor, Tensor]:
        full = marked(mask.full_kv_num_blocks, mask.full_kv_indices)
        return marked(mask.kv_num_blocks, mask.kv_indices) | full, full

    for found, expected in zip(blocks(ours), blocks(theirs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize("sloping", [False, True], ids=["", "slopes"])
def test_attention_in_blocks_equals_the_equation(window: int | None, sloping: bool) -> None:
    ids = (torch.arange(300)[None] >= torch.tensor([[40], [256]])).long()
    q, k, v = (heads.detach().float() for heads in random_heads(2, 300, 4, 2, width=16))
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004]) if sloping else None
    mask = AttentionMask(documents=block_mask(300, number_documents(ids), window), slopes=slopes)
    with torch.compiler.set_stance("force_eager"):
        found = attend(q, k, v, mask)
    expected = reference(q.double(), k.double(), v.double(), slow_allowed(ids, window), slopes)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpus_kernel_equals_attention_in_segments(dtype) -> None:
    ids = (torch.arange(300)[None] >= torch.tensor([[40], [256]])).long().cuda()
    inputs = [heads.detach().to("cuda", dtype).requires_grad_() for heads in random_heads(2, 300, 4, 2, width=64)]
    mask = attention_mask(300, 300, document_ids=ids, device="cuda", kind=AttentionKind(head_dim=64, value_dim=64))
    assert isinstance(mask.documents, BlockMask)
    found = attend(*inputs, mask)
    expected = attend(*inputs, AttentionMask(documents=Segments.of(number_documents(ids))))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=10 * tolerance, rtol=0)


def test_a_mask_for_no_dropout_refuses_dropout() -> None:
    q, k, v = random_heads(1, 4, 1, 1)
    with pytest.raises(ValueError, match="without dropout in compiled attention"):
        attend(q, k, v, AttentionMask(documents=torch.zeros(1, 4).long()), 0.1)


def test_no_mask_of_all_pairs_is_built_for_documents() -> None:
    mask = attention_mask(64, 64, document_ids=torch.arange(64)[None] // 9)
    assert mask.allowed is None
    assert isinstance(mask.documents, Segments)


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
