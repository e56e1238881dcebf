"""Attention in strips against the equation with the whole mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.model import ModelConfig, build_model
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.attention.kernel import AttentionKind, Score
from sheepop.model.attention.stepwise import Stepwise
from sheepop.model.attention.strips import Strips


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
    kind = AttentionKind(window=window)
    sight = kind.sight(length)
    kernel = choose_kernel(kind, sight).kernel
    assert isinstance(kernel, Strips) == (2 * window <= length)
    found, expected = (which.prepare(kind, sight).attend(q, k, v, Score(scale)) for which in (kernel, Stepwise()))
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    pairs = (torch.autograd.grad(out, (q, k, v), gradient) for out in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("settings", "others", "reason"),
    [
        ({"sinks": True}, {}, "has no sinks"),
        ({"slopes": torch.ones(2)}, {}, "has no distances"),
        ({"soft_cap": True}, {}, "has no soft cap"),
        ({"watched": True}, {}, "has no visible scores"),
        ({}, {"document_ids": torch.zeros(1, 12)}, "has no documents"),
        ({}, {"starts": torch.tensor([0])}, "has no partial rows"),
        ({"window": 7}, {}, "saves nothing without a window of at most half a row"),
        ({"backend": "eager"}, {}, "is left out by attention_backend: eager"),
    ],
)
def test_what_strips_cannot_do_is_left_to_other_kernels(settings, others, reason) -> None:
    assert choose_kernel(AttentionKind(window=3), AttentionKind(window=3).sight(12)).kernel.name == "strips"
    kind = AttentionKind(**{"window": 3, **settings})
    assert dict(choose_kernel(kind, kind.sight(12, **others)).passed_over)["strips"] == reason


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
