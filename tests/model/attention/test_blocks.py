"""Attention in blocks: which blocks are needed, its numbers, and how often it is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sheepop.model.attention import blocks
from sheepop.model.attention.blocks import Blocks, BlocksAttention, block_mask
from sheepop.model.attention.kernel import AttentionKind, Score
from sheepop.model.attention.sight import number_documents
from sheepop.model.attention.stepwise import Stepwise


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

    ours = block_mask(AttentionKind(window=window).sight(length, document_ids=numbers))
    theirs = create_block_mask(visible, rows, None, length, length, device="cpu")
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE == (128, 128)
    assert ours.seq_lengths == theirs.seq_lengths

    def needed(mask: BlockMask) -> tuple[Tensor, Tensor]:
        full = marked(mask.full_kv_num_blocks, mask.full_kv_indices)
        return marked(mask.kv_num_blocks, mask.kv_indices) | full, full

    for found, expected in zip(needed(ours), needed(theirs), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts the compilations of the kernel, whose code is then run as it is written."""
    torch.compiler.reset()
    compiled = CompileCounter()
    run = torch.compile(flex_attention, fullgraph=True, backend=compiled)
    monkeypatch.setattr(blocks, "_compiled_flex_attention", lambda: run)
    yield compiled
    torch.compiler.reset()


def drawn(rows: int, length: int, heads: int = 2, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(rows, heads, length, width, generator=generator)


@pytest.mark.parametrize("settings", [{}, {"slopes": torch.tensor([0.5, 0.1])}, {"window": 9}], ids=str)
def test_twenty_lengths_are_compiled_at_most_three_times(counter, settings) -> None:
    """Once for the first length, and then for any: before, each of the first eight, and none after them."""
    kind = AttentionKind(**settings)
    for length in range(40, 240, 10):
        ids = (torch.arange(length)[None] >= torch.tensor([[length // 3], [length // 2]])).long()
        sight = kind.sight(length, document_ids=ids)
        q, k, v = drawn(2, length), drawn(2, length, 1), drawn(2, length, 1)
        found = Blocks().prepare(kind, sight).attend(q, k, v)
        torch.testing.assert_close(found, Stepwise().prepare(kind, sight).attend(q, k, v), atol=1e-5, rtol=0)
    assert counter.frame_count <= 3


@pytest.mark.usefixtures("counter")
def test_too_many_compilations_are_an_error_and_not_full_scores(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "_KINDS", 2)
    attending = BlocksAttention(block_mask(AttentionKind().sight(8)))
    with pytest.raises(FailOnRecompileLimitHit):
        for cap in (1.0, 2.0, 3.0, 4.0, 5.0):
            for dtype in (torch.float32, torch.float64):
                attending.attend(*[drawn(1, 8).to(dtype)] * 3, Score(soft_cap=cap))
