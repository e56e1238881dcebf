"""Attention in strips against the equation with the whole mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.model import ModelConfig, build_model
from sheepop.model.attention import attend
from sheepop.model.distances import allowed_by_distance
from sheepop.model.mask import AttentionKind, AttentionMask, attention_mask
from sheepop.model.window_attention import Strips


@settings(deadline=None)
@given(
    length=st.integers(2, 40),
    window=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    value_width=st.sampled_from([8, 4]),
    scale=st.sampled_from([None, 0.3]),
)
def test_values_and_gradients_are_those_of_the_whole_mask(length, window, heads, value_width, scale) -> None:
    generator = torch.Generator().manual_seed(length * 100 + window)

    def drawn(count: int, width: int) -> torch.Tensor:
        return torch.randn(2, count, length, width, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = drawn(heads[0], 8), drawn(heads[1], 8), drawn(heads[1], value_width)
    strips = attention_mask(length, length, kind=AttentionKind(window=window))
    whole = AttentionMask(allowed_by_distance(length, length, window=window)[None, None], eager=True)
    assert isinstance(strips.documents, Strips) == (2 * window <= length)
    found, expected = (attend(q, k, v, mask, scale=scale) for mask in (strips, whole))
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    pairs = (torch.autograd.grad(out, (q, k, v), gradient) for out in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ({"sinks": True}, {}),
        ({"slopes": torch.ones(2)}, {}),
        ({"backend": "eager"}, {}),
        ({"soft_cap": True}, {}),
        ({}, {"key_mask": torch.tensor([[False] + [True] * 11])}),
        ({}, {"document_ids": torch.zeros(1, 12, dtype=torch.long)}),
    ],
)
def test_what_strips_cannot_do_is_left_to_other_masks(kind, others) -> None:
    assert isinstance(attention_mask(12, 12, kind=AttentionKind(window=3)).documents, Strips)
    assert not isinstance(attention_mask(12, 12, kind=AttentionKind(window=3, **kind), **others).documents, Strips)
    assert not isinstance(attention_mask(5, 12, kind=AttentionKind(window=3)).documents, Strips)


def test_sinks_are_refused_under_a_mask_that_was_built_without_them() -> None:
    mask = attention_mask(12, 12, kind=AttentionKind(window=3))
    heads = torch.zeros(1, 2, 12, 4)
    with pytest.raises(ValueError, match="without sinks in strips"):
        attend(heads, heads, heads, mask, sinks_H=torch.zeros(2))


def test_no_tensor_is_as_large_as_all_pairs() -> None:
    """Scores and masks of 512 places with a window of 16 would have 2^18 entries."""
    settings = {"vocab_size": 32, "d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 512, "dropout": 0.0}
    model = build_model(ModelConfig(**settings, sliding_window=16, position_encoding="rope"), 0)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for result in found if isinstance(found, tuple | list) else (found,):
                if isinstance(result, torch.Tensor):
                    largest = max(largest, result.untyped_storage().nbytes())
            return found

    with Sizes():
        model(torch.zeros(1, 512, dtype=torch.long)).sum().backward()
    assert 0 < largest < 2**18
