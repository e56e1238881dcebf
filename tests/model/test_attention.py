"""Attention against slow float64 loops and against torch.nn.MultiheadAttention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.model.attention import Attention, attend
from sheepop.model.mask import AttentionKind, AttentionMask, attention_mask


def slow_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Equation 1, one query at a time; q (B, H, T, C), k and v (B, K, S, C), allowed (B, T, S)."""
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(batch, heads, queries):
        seen = [s for s in range(k.shape[2]) if allowed[b, t, s]]
        scores = [sum(q[b, h, t, c] * k[b, h // group, s, c] for c in range(width)) / width**0.5 for s in seen]
        weights = np.exp(np.array(scores) - max(scores))
        for weight, s in zip(weights / weights.sum(), seen, strict=True):
            out[b, h, t] += weight * v[b, h // group, s]
    return out


def random_heads(heads: int, kv_heads: int, queries: int, keys: int) -> list[np.ndarray]:
    state = np.random.RandomState(heads * 100 + kv_heads)
    return [state.randn(2, heads, queries, 4), state.randn(2, kv_heads, keys, 4), state.randn(2, kv_heads, keys, 4)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("kind", "queries"),
    [("plain", 5), ("plain", 3), ("plain", 1), ("padded", 5), ("padded", 3), ("padded", 1), ("documents", 5)],
)
def test_attend_equals_slow_loops(heads, kv_heads, kind, queries):
    keys = 5
    documents = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])
    real = np.array([[True] * 5, [False, False, True, True, True]])
    allowed = np.zeros((2, queries, keys), dtype=bool)
    for b, t, s in np.ndindex(allowed.shape):
        position = keys - queries + t
        allowed[b, t, s] = s <= position
        if kind == "documents":
            allowed[b, t, s] &= documents[b, s] == documents[b, position]
        if kind == "padded":
            allowed[b, t, s] &= real[b, s] or s == position
    mask = attention_mask(
        queries,
        keys,
        document_ids=torch.from_numpy(documents) if kind == "documents" else None,
        key_mask=torch.from_numpy(real) if kind == "padded" else None,
    )
    arrays = random_heads(heads, kv_heads, queries, keys)
    found = attend(*(torch.from_numpy(array) for array in arrays), mask)
    np.testing.assert_allclose(found, slow_attention(*arrays, allowed), atol=1e-12)


def test_grouped_heads_equal_full_heads_whose_keys_and_values_are_repeated():
    grouped_config = ModelConfig(d_model=24, num_heads=6, num_kv_heads=2, dropout=0.0)
    grouped = Attention(grouped_config, layer=0)
    full = Attention(grouped_config.replace(num_kv_heads=6), layer=0)
    full.q_proj.load_state_dict(grouped.q_proj.state_dict())
    full.o_proj.load_state_dict(grouped.o_proj.state_dict())
    for name in ("k_proj", "v_proj"):
        few, many = getattr(grouped, name), getattr(full, name)
        with torch.no_grad():
            many.weight.copy_(few.weight.view(2, 4, 24).repeat_interleave(3, dim=0).reshape(24, 24))
            many.bias.copy_(few.bias.view(2, 4).repeat_interleave(3, dim=0).reshape(24))
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grouped(x, attention_mask(5, 5)), full(x, attention_mask(5, 5)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_equals_torch_multi_head_attention(bias):
    ours = Attention(ModelConfig(d_model=24, num_heads=4, bias=bias, dropout=0.0), layer=0)
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
            theirs.out_proj.bias.copy_(ours.o_proj.bias)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))
    forbidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=forbidden, need_weights=False)
    torch.testing.assert_close(ours(x, attention_mask(7, 7)), expected, atol=1e-6, rtol=0)


def test_fully_padded_rows_stay_finite_in_value_and_gradient():
    mask = attention_mask(4, 4, key_mask=torch.tensor([[False] * 4, [False, False, True, True]]))
    tensors = [torch.randn(2, 2, 4, 4, requires_grad=True) for _ in range(3)]
    out = attend(*tensors, mask)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(out.sum(), tensors))


def test_a_triangle_that_has_to_be_built_is_never_guessed():
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match="3 queries over 5 keys need a mask built by attention_mask"):
        attend(q, k, k, AttentionMask())


@pytest.mark.parametrize(
    ("queries", "arguments", "message"),
    [
        (5, {"document_ids": torch.zeros(2, 4)}, r"document_ids has shape \(2, 4\)"),
        (5, {"key_mask": torch.ones(5, dtype=torch.bool)}, r"key_mask has shape \(5,\)"),
        (1, {"document_ids": torch.zeros(2, 5)}, "document_ids need every position as a query; got 1 of 5"),
    ],
)
def test_masks_of_another_shape_are_refused(queries, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_mask(queries, 5, **arguments)


@pytest.mark.parametrize(("queries", "padded"), [(5, False), (5, True), (1, False)], ids=["whole", "padded", "step"])
def test_blocks_are_refused_where_they_cannot_be_computed(queries, padded):
    key_mask = torch.tensor([[False, True, True, True, True]]) if padded else None
    kind = AttentionKind(head_dim=64, value_dim=64, backend="flex")
    with pytest.raises(ConfigError, match=r"flex needs an NVIDIA GPU from 2020 on.*this network runs on cpu with 64"):
        attention_mask(queries, 5, key_mask=key_mask, kind=kind)
