"""How tensors lie in other programs, against loops that move one number at a time; and back, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.checkpoint.exchange.tensor_rules import ABSENT, INTERLEAVED, PER_EXPERT, SAME, TRANSPOSED, Layout, Stacked
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig

HEADS, WIDTH = 3, 2
CONFIG = ModelConfig(vocab_size=5, d_model=HEADS * WIDTH, num_heads=HEADS)


def numbered(*shape: int, start: float = 0.0) -> Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)


def test_fused_rows_lie_one_below_the_other():
    q, k, v = numbered(2, 4), numbered(1, 4, start=100), numbered(3, 4, start=200)
    (fused,) = Stacked().to_theirs([q, k, v], CONFIG)
    assert fused.tolist() == q.tolist() + k.tolist() + v.tolist()


def test_a_transposed_matrix_has_inputs_as_rows():
    (theirs,) = Stacked(transposed=True).to_theirs([numbered(2, 3), numbered(1, 3, start=50)], CONFIG)
    assert theirs.tolist() == [[0, 3, 50], [1, 4, 51], [2, 5, 52]]
    (bias,) = Stacked(transposed=True).to_theirs([numbered(2), numbered(1, start=9)], CONFIG)
    assert bias.tolist() == [0, 1, 9]


@pytest.mark.parametrize("columns", [(), (4,)])
def test_interleaved_heads_hold_queries_keys_and_values_in_turn(columns):
    rows = HEADS * WIDTH
    ours = [numbered(rows, *columns, start=start) for start in (0, 1000, 2000)]
    (fused,) = INTERLEAVED.to_theirs(ours, CONFIG)
    row = 0
    for head in range(HEADS):
        for part in range(3):
            for column in range(WIDTH):
                assert torch.equal(fused[row], ours[part][head * WIDTH + column])
                row += 1
    assert row == len(fused)


def test_experts_are_stored_one_by_one():
    whole = numbered(3, 2, 4)
    assert [expert.tolist() for expert in PER_EXPERT.to_theirs([whole], CONFIG)] == whole.tolist()


rows = st.integers(1, 4)


@settings(max_examples=60)
@given(st.sampled_from([SAME, TRANSPOSED, INTERLEAVED, PER_EXPERT]), rows, rows, st.booleans())
def test_every_layout_is_reversible_and_tells_its_shapes(layout: Layout, a: int, b: int, is_bias: bool):
    columns = () if is_bias else (b,)
    if layout is INTERLEAVED:
        ours = [torch.randn(HEADS * a, *columns) for _ in range(3)]
    elif layout is PER_EXPERT:
        ours = [torch.randn(a, b, *columns)]
    else:
        ours = [torch.randn(size, *columns) for size in (a, b, a)]
    shapes = [tuple(tensor.shape) for tensor in ours]
    theirs = layout.to_theirs(ours, CONFIG)
    assert [tuple(tensor.shape) for tensor in theirs] == layout.shapes(shapes)
    back = layout.to_ours(theirs, shapes, CONFIG)
    assert len(back) == len(ours)
    assert all(torch.equal(one, other) for one, other in zip(back, ours, strict=True))


def test_what_has_no_place_must_be_zero():
    assert ABSENT.to_theirs([torch.zeros(4)], CONFIG) == []
    assert ABSENT.to_ours([], [(4,)], CONFIG)[0].tolist() == [0, 0, 0, 0]
    with pytest.raises(CheckpointError, match="balance"):
        ABSENT.to_theirs([torch.tensor([0.0, 0.1])], CONFIG)
