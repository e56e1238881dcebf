"""Causal attention of whole rows: PyTorch's kernel, or for bfloat16 on a CPU products of large blocks.

PyTorch's kernel for the CPU takes its products in small tiles, one head at a time. Where the processor multiplies
bfloat16 itself, products of many heads at once take a third of that time, the softmax between them included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Instructions for products of bfloat16, on x86: others emulate them, or have not been measured.
HAS_BFLOAT16_PRODUCTS = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

# Scores that are computed together: enough for a product to be efficient, few enough to stay in the cache.
_SCORES = 1 << 21
# Queries of a block, for rows up to a length and for longer ones. Fewer skip more of what causality forbids.
_QUERIES, _LONG, _QUERIES_OF_LONG = 128, 512, 256


def takes_products(q_BHTC: Tensor, dropout: float = 0.0) -> bool:
    """Whether attention of these queries is computed by products of blocks."""
    return HAS_BFLOAT16_PRODUCTS and q_BHTC.device.type == "cpu" and q_BHTC.dtype == torch.bfloat16 and dropout == 0.0


def attend_causally(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of T positions to themselves and those before them (B, H, T, C); K heads serve H in groups."""
    if takes_products(q_BHTC, dropout):
        return causal_products(q_BHTC, k_BKTC, v_BKTC, scale or q_BHTC.shape[-1] ** -0.5).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        dropout_p=dropout,
        is_causal=True,
        scale=scale,
        enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
    )


@torch.library.custom_op("sheepop::causal_products", mutates_args=(), device_types="cpu")
def causal_products(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float) -> Tensor:
    """Causal attention (B, T, H, C) by products of blocks. Scores are rounded to the data type of the queries.

    One operator for the compiler, which does not look into it. Weights are computed again in the backward pass, so
    that nothing is kept but queries, keys and values.
    """
    q_NGTC, k_NTC, v_NTC = _by_key_head(q_BHTC, k_BKTC), k_BKTC.flatten(0, 1), v_BKTC.flatten(0, 1)
    out_NGTC = q_NGTC.new_empty(*q_NGTC.shape[:3], v_NTC.shape[2])
    for block in _blocks(q_NGTC):
        weights, _ = block.weights(q_NGTC, k_NTC, scale)
        out_NGTC[block.queries] = torch.bmm(weights, v_NTC[block.keys]).view_as(out_NGTC[block.queries])
    return _heads_last(out_NGTC, q_BHTC.shape[:2])


@causal_products.register_fake
def _shape(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float) -> Tensor:
    batch, heads, length, _ = q_BHTC.shape
    return q_BHTC.new_empty(batch, length, heads, v_BKTC.shape[3])


@torch.library.custom_op("sheepop::causal_products_backward", mutates_args=(), device_types="cpu")
def causal_products_backward(
    gradient_BTHC: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each (B, T, heads, C)."""
    q_NGTC, k_NTC, v_NTC = _by_key_head(q_BHTC, k_BKTC), k_BKTC.flatten(0, 1), v_BKTC.flatten(0, 1)
    gradient_NGTC = _by_key_head(gradient_BTHC.transpose(1, 2), k_BKTC)
    # Keys and values are seen by many blocks of queries, whose parts are added up in float32.
    exact = torch.float32 if q_BHTC.dtype.itemsize < 4 else q_BHTC.dtype
    for_q = torch.empty_like(q_NGTC)
    for_k, for_v = (torch.zeros_like(part, dtype=exact) for part in (k_NTC, v_NTC))
    for block in _blocks(q_NGTC):
        weights, queries = block.weights(q_NGTC, k_NTC, scale)
        gradient = gradient_NGTC[block.queries].flatten(1, 2)
        for_v[block.keys] += torch.bmm(weights.transpose(1, 2), gradient)
        for_weights = torch.bmm(gradient, v_NTC[block.keys].transpose(1, 2))
        for_scores = torch._softmax_backward_data(for_weights, weights, -1, weights.dtype, grad_input=for_weights)
        for_q[block.queries] = torch.bmm(for_scores, k_NTC[block.keys]).view_as(for_q[block.queries])
        for_k[block.keys] += torch.bmm(for_scores.transpose(1, 2), queries)
    shape = k_BKTC.shape[:2]
    return (
        _heads_last(for_q.mul_(scale), q_BHTC.shape[:2]),
        _heads_last(for_k.mul_(scale).to(k_BKTC.dtype)[:, None], shape),
        _heads_last(for_v.to(v_BKTC.dtype)[:, None], shape),
    )


@causal_products_backward.register_fake
def _backward_shapes(
    gradient_BTHC: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    for_q, for_k, for_v = (
        heads.new_empty(heads.shape[0], heads.shape[2], heads.shape[1], heads.shape[3])
        for heads in (q_BHTC, k_BKTC, v_BKTC)
    )
    return for_q, for_k, for_v


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v)


def _gradients(ctx: Any, gradient_BTHC: Tensor) -> tuple[Tensor | None, ...]:
    found = causal_products_backward(gradient_BTHC, *ctx.saved_tensors, ctx.scale)
    return (*(gradient.transpose(1, 2) for gradient in found), None)


causal_products.register_autograd(_gradients, setup_context=_keep)


class _Block(NamedTuple):
    """Some queries of some key heads, and the keys that they see."""

    queries: tuple[slice, slice, slice]  # of (N, G, T)
    keys: tuple[slice, slice]  # of (N, T)
    ceiling: Tensor  # (queries, queries), infinite where a query may look and minus infinite where it may not

    def weights(self, q_NGTC: Tensor, k_NTC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The softmax of the scores (n, G queries, keys), and the queries (n, G queries, C)."""
        q_NRC, k_NSC = q_NGTC[self.queries].flatten(1, 2), k_NTC[self.keys]
        like = q_NRC.new_empty(1, 1, 1).expand(*q_NRC.shape[:2], k_NSC.shape[1])  # of no weight in the sum
        scores_NRS = torch.baddbmm(like, q_NRC, k_NSC.transpose(1, 2), beta=0.0, alpha=scale)
        size = len(self.ceiling)
        diagonal = scores_NRS.view(len(scores_NRS), -1, size, scores_NRS.shape[2])[..., -size:]
        torch.minimum(diagonal, self.ceiling, out=diagonal)
        return torch.softmax(scores_NRS, -1, out=scores_NRS), q_NRC


def _blocks(q_NGTC: Tensor) -> Iterator[_Block]:
    """All queries, in blocks of about `_SCORES` scores."""
    count, group, length, _ = q_NGTC.shape
    most = _QUERIES if length <= _LONG else _QUERIES_OF_LONG
    size = min(most, length, max(1, _SCORES // (group * length)))
    allowed = torch.ones(size, size, dtype=torch.bool, device=q_NGTC.device).tril()
    ceiling = torch.where(allowed, torch.inf, -torch.inf).to(q_NGTC.dtype)
    for start in range(0, length, size):
        end = min(length, start + size)
        heads = max(1, _SCORES // (group * (end - start) * end))
        heads = -(-count // -(-count // heads))  # blocks of about equal size
        for first in range(0, count, heads):
            of = slice(first, first + heads)
            yield _Block((of, slice(None), slice(start, end)), (of, slice(end)), ceiling[: end - start, : end - start])


def _by_key_head(q_BHTC: Tensor, k_BKTC: Tensor) -> Tensor:
    """Queries in the groups that one key head serves (B K, H / K, T, C)."""
    batch, heads, *shape = q_BHTC.shape
    kv_heads = k_BKTC.shape[1]
    return q_BHTC.reshape(batch * kv_heads, heads // kv_heads, *shape)


def _heads_last(parts_NGTC: Tensor, batch_and_heads: torch.Size) -> Tensor:
    """(B, T, heads, C), as the projections before and behind attention have them."""
    return parts_NGTC.reshape(*batch_and_heads, *parts_NGTC.shape[2:]).transpose(1, 2).contiguous()
