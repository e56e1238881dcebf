"""Attention against slow float64 loops and against torch.nn.MultiheadAttention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sheepop.model import ModelConfig
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind
from sheepop.model.attention.layer import Attention


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
    ("case", "queries"),
    [("plain", 5), ("plain", 3), ("plain", 1), ("uneven", 3), ("uneven", 1), ("documents", 5), ("padded", 3)],
)
def test_attend_equals_slow_loops(heads, kv_heads, case, queries):
    keys = 5
    documents = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])
    starts = np.array([keys - queries, 1 if case == "uneven" else keys - queries])
    real = np.array([[True] * 5, [True, True, True, False, False]])
    allowed = np.zeros((2, queries, keys), dtype=bool)
    for b, t, s in np.ndindex(allowed.shape):
        place = starts[b] + t
        allowed[b, t, s] = s <= place
        if case == "documents":
            allowed[b, t, s] &= documents[b, s] == documents[b, place]
        if case == "padded":
            allowed[b, t, s] = real[b, s]
    kind = AttentionKind(causal=case != "padded")
    sight = kind.sight(
        queries,
        keys,
        document_ids=torch.from_numpy(documents) if case == "documents" else None,
        starts=torch.from_numpy(starts) if case == "uneven" else None,
        key_mask=torch.from_numpy(real) if case == "padded" else None,
    )
    arrays = random_heads(heads, kv_heads, queries, keys)
    found = prepare_attention(kind, sight).attend(*(torch.from_numpy(array) for array in arrays))
    np.testing.assert_allclose(found, slow_attention(*arrays, allowed), atol=1e-12)


def plain(length: int) -> Attending:
    kind = AttentionKind()
    return prepare_attention(kind, kind.sight(length))


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
    torch.testing.assert_close(grouped(x, plain(5)), full(x, plain(5)), atol=1e-6, rtol=0)


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
    torch.testing.assert_close(ours(x, plain(7)), expected, atol=1e-6, rtol=0)
