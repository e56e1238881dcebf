"""How tensors lie in other programs, against loops that move one number at a time; and back, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.checkpoint.exchange.tensor_rules import (
    ABSENT,
    BY_KEY_HEAD,
    HEAD_PAIRS,
    INTERLEAVED,
    PER_EXPERT,
    ROTARY_PAIRS,
    SAME,
    STACKED_EXPERTS,
    TAPS,
    TRANSPOSED,
    Behind,
    Layout,
    Stacked,
)
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


def test_the_parts_of_a_key_head_lie_together_however_wide_they_are():
    delta = {"layers": [0], "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 1, "value_head_dim": 3}
    config = ModelConfig(vocab_size=5, d_model=6, num_heads=3, num_layers=2, gated_delta_net=delta)
    keys, values = numbered(2, 1), numbered(12, 1, start=100)
    (fused,) = BY_KEY_HEAD.to_theirs([keys, values], config)
    assert fused.flatten().tolist() == [0, *range(100, 106), 1, *range(106, 112)]
    back = BY_KEY_HEAD.to_ours([fused], [(2, 1), (12, 1)], config)
    assert all(torch.equal(one, other) for one, other in zip(back, (keys, values), strict=True))


def test_taps_are_kernels_in_order_of_time_with_the_channels_of_all_convolutions():
    ours = [numbered(3, 2), numbered(3, 1, start=50)]
    (kernel,) = TAPS.to_theirs(ours, CONFIG)
    assert kernel.tolist() == [[[4, 2, 0]], [[5, 3, 1]], [[52, 51, 50]]]
    assert TAPS.shapes([(3, 2), (3, 1)]) == [tuple(kernel.shape)]
    back = TAPS.to_ours([kernel], [(3, 2), (3, 1)], CONFIG)
    assert all(torch.equal(one, other) for one, other in zip(back, ours, strict=True))


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


@pytest.mark.parametrize("columns", [(), (4,)])
def test_neighbouring_rows_of_a_head_are_the_two_rows_of_a_pair(columns):
    config = ModelConfig(
        vocab_size=5, d_model=6, num_heads=HEADS, head_dim=5, position_encoding="rope", rotary_fraction=0.8
    )
    ours = numbered(HEADS * 5, *columns)
    (theirs,) = ROTARY_PAIRS.to_theirs([ours], config)
    for head in range(HEADS):
        for pair in range(2):
            for part in range(2):
                assert torch.equal(theirs[head * 5 + 2 * pair + part], ours[head * 5 + pair + 2 * part])
        assert torch.equal(theirs[head * 5 + 4], ours[head * 5 + 4])  # the column that does not rotate
    assert torch.equal(ROTARY_PAIRS.to_ours([theirs], [tuple(ours.shape)], config)[0], ours)


@pytest.mark.parametrize("heads", [(), (HEADS,)])
def test_the_weights_of_norms_of_heads_have_the_columns_of_a_pair_side_by_side(heads):
    config = ModelConfig(
        vocab_size=5, d_model=6, num_heads=HEADS, head_dim=5, position_encoding="rope", rotary_fraction=0.8
    )
    ours = numbered(*heads, 5)
    (theirs,) = HEAD_PAIRS.to_theirs([ours], config)
    assert torch.equal(theirs, ours[..., [0, 2, 1, 3, 4]])
    assert torch.equal(HEAD_PAIRS.to_ours([theirs], [tuple(ours.shape)], config)[0], ours)


@pytest.mark.parametrize("columns", [(), (4,)])
def test_projections_of_stacked_experts_alternate_in_the_outputs(columns):
    gate, up = numbered(2, 3, *columns), numbered(2, 3, *columns, start=1000)
    (theirs,) = STACKED_EXPERTS.to_theirs([gate, up], CONFIG)
    for expert in range(2):
        for output in range(3):
            assert torch.equal(theirs[expert, ..., 2 * output], gate[expert, output])
            assert torch.equal(theirs[expert, ..., 2 * output + 1], up[expert, output])


def test_rows_that_nothing_reads_are_left_out_and_written_as_zeros():
    layout = Behind(skipped=2)
    (theirs,) = layout.to_theirs([numbered(3, 2)], CONFIG)
    assert theirs.tolist() == [[0, 0], [0, 0], [0, 1], [2, 3], [4, 5]]


def test_experts_are_stored_one_by_one():
    whole = numbered(3, 2, 4)
    assert [expert.tolist() for expert in PER_EXPERT.to_theirs([whole], CONFIG)] == whole.tolist()


rows = st.integers(1, 4)


@settings(max_examples=60)
@given(
    st.sampled_from([SAME, TRANSPOSED, INTERLEAVED, PER_EXPERT, STACKED_EXPERTS, Behind(skipped=2)]),
    rows,
    rows,
    st.booleans(),
)
def test_every_layout_is_reversible_and_tells_its_shapes(layout: Layout, a: int, b: int, is_bias: bool):
    columns = () if is_bias else (b,)
    if layout is INTERLEAVED:
        ours = [torch.randn(HEADS * a, *columns) for _ in range(3)]
    elif layout is PER_EXPERT or isinstance(layout, Behind):
        ours = [torch.randn(a, b, *columns)]
    elif layout is STACKED_EXPERTS:
        ours = [torch.randn(a, b, *columns) for _ in range(2)]
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
