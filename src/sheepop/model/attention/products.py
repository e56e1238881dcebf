"""Causal attention in bfloat16 on a CPU, by matrix products of large blocks.

PyTorch's CPU kernel multiplies small tiles, one head at a time. On a processor with bfloat16 instructions, products of
many heads at once take a third of that time, softmax included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score, missing
from sheepop.model.attention.sight import Sight

# x86 instructions that multiply bfloat16; other processors emulate them or have not been measured.
HAS_BFLOAT16_PRODUCTS = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

# Number of scores computed together: enough for an efficient product, few enough to stay in the cache.
_SCORES = 1 << 21
# Queries in a block, for rows of up to _LONG positions and for longer ones. Smaller blocks skip more masked scores.
_QUERIES, _LONG, _QUERIES_OF_LONG = 128, 512, 256


class Products:
    """Causal attention of whole rows, or of documents in rows, in bfloat16 on a CPU with bfloat16 products."""

    name = "products"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Supports only bfloat16 on such a CPU, and of the features only documents."""
        if not HAS_BFLOAT16_PRODUCTS:
            return "needs a processor with bfloat16 products (AVX-512 or AMX)"
        if kind.device.type != "cpu" or kind.dtype != torch.bfloat16:
            return f"is for bfloat16 on a CPU, not for {str(kind.dtype).removeprefix('torch.')} on {kind.device.type}"
        return missing(self.name, kind, sight) or (
            "saves nothing for a single position" if sight.num_queries == 1 else None
        )

    def prepare(self, kind: AttentionKind, sight: Sight) -> ProductsAttention:
        """Keeps the document numbers, if there are any."""
        return ProductsAttention(sight.documents)


@dataclass(frozen=True)
class ProductsAttention:
    """Calls `causal_products`, within documents if their numbers (B, T) are given."""

    documents: Tensor | None = None

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C)."""
        score.check("products")
        scale = q_BHTC.shape[-1] ** -0.5 if score.scale is None else score.scale
        return causal_products(q_BHTC, k_BKTC, v_BKTC, scale, self.documents).transpose(1, 2)


@torch.library.custom_op("sheepop::causal_products", mutates_args=(), device_types="cpu")
def causal_products(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float, documents_BT: Tensor | None = None
) -> Tensor:
    """Computes causal attention (B, T, H, C) block by block. Scores are rounded to the data type of the queries.

    This is an opaque operator to the compiler, because code compiled for the documents of one batch would not fit the
    next. The backward pass recomputes the weights, so that only queries, keys and values are saved.
    """
    q_BKGTC, k_BKTC, v_BKTC = _by_key_head(q_BHTC, k_BKTC), k_BKTC.contiguous(), v_BKTC.contiguous()
    out_BKGTC = q_BKGTC.new_empty(*q_BKGTC.shape[:4], v_BKTC.shape[3])
    for block in _blocks(q_BKGTC, documents_BT):
        weights_NRS, _ = block.weights(q_BKGTC, k_BKTC, scale)
        block.of_queries(out_BKGTC).copy_(block.shaped(torch.bmm(weights_NRS, block.of_keys(v_BKTC))))
    return _heads_last(out_BKGTC)


@causal_products.register_fake
def _shape(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float, documents_BT: Tensor | None = None) -> Tensor:
    batch, heads, length, _ = q_BHTC.shape
    return q_BHTC.new_empty(batch, length, heads, v_BKTC.shape[3])


@torch.library.custom_op("sheepop::causal_products_backward", mutates_args=(), device_types="cpu")
def _causal_products_backward(
    gradient_BTHC: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float, documents_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values, each (B, T, heads, C)."""
    q_BKGTC, k_BKTC, v_BKTC = _by_key_head(q_BHTC, k_BKTC), k_BKTC.contiguous(), v_BKTC.contiguous()
    gradient_BKGTC = _by_key_head(gradient_BTHC.transpose(1, 2), k_BKTC)
    # Many blocks of queries contribute to a key's or value's gradient, which is summed in float32.
    exact = torch.float32 if q_BHTC.dtype.itemsize < 4 else q_BHTC.dtype
    for_q = torch.empty_like(q_BKGTC)
    for_k, for_v = (torch.zeros_like(part, dtype=exact) for part in (k_BKTC, v_BKTC))
    for block in _blocks(q_BKGTC, documents_BT):
        weights_NRS, q_NRC = block.weights(q_BKGTC, k_BKTC, scale)
        gradient_NRC = block.joined(gradient_BKGTC)
        block.add(for_v, torch.bmm(weights_NRS.transpose(1, 2), gradient_NRC))
        for_weights = torch.bmm(gradient_NRC, block.of_keys(v_BKTC).transpose(1, 2))
        for_scores = torch._softmax_backward_data(for_weights, weights_NRS, -1, q_NRC.dtype, grad_input=for_weights)
        block.of_queries(for_q).copy_(block.shaped(torch.bmm(for_scores, block.of_keys(k_BKTC))))
        block.add(for_k, torch.bmm(for_scores.transpose(1, 2), q_NRC))
    return (
        _heads_last(for_q.mul_(scale)),
        _heads_last(for_k.mul_(scale).to(k_BKTC.dtype)[:, :, None]),
        _heads_last(for_v.to(v_BKTC.dtype)[:, :, None]),
    )


@_causal_products_backward.register_fake
def _backward_shapes(
    gradient_BTHC: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float, documents_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    for_q, for_k, for_v = (heads.new_empty(heads.transpose(1, 2).shape) for heads in (q_BHTC, k_BKTC, v_BKTC))
    return for_q, for_k, for_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.scale, documents = inputs
    ctx.save_for_backward(q, k, v, documents)


def _gradients(ctx: Any, gradient_BTHC: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, documents = ctx.saved_tensors
    found = _causal_products_backward(gradient_BTHC, q, k, v, ctx.scale, documents)
    return (*(gradient.transpose(1, 2) for gradient in found), None, None)


causal_products.register_autograd(_gradients, setup_context=_keep)


class _Block(NamedTuple):
    """A block: some queries of some key heads in some rows, and the keys that they see.

    N is rows times key heads; R is the queries of a key head, its query heads times positions.
    """

    rows: slice
    heads: slice
    queries: slice
    keys: slice
    ceiling: Tensor
    """Upper bound of the scores of the last keys: infinity where a query sees a key, minus infinity where not; every
    query sees all earlier keys. (queries, keys), or (rows, 1, 1, queries, keys) with documents."""

    def of_queries(self, heads_BKGTC: Tensor) -> Tensor:
        """Returns the block's part of a tensor of queries or of the same layout."""
        return heads_BKGTC[self.rows, self.heads, :, self.queries]

    def joined(self, heads_BKGTC: Tensor) -> Tensor:
        """Returns `of_queries` as (N, R, C)."""
        return self.of_queries(heads_BKGTC).flatten(0, 1).flatten(1, 2)

    def shaped(self, joined_NRC: Tensor) -> Tensor:
        """Reverses `joined`: returns (rows, key heads, groups, queries, C)."""
        rows, size = self.rows.stop - self.rows.start, self.queries.stop - self.queries.start
        return joined_NRC.view(rows, len(joined_NRC) // rows, -1, size, joined_NRC.shape[2])

    def of_keys(self, heads_BKTC: Tensor) -> Tensor:
        """Returns the block's part of keys or values (N, keys, C)."""
        return heads_BKTC[self.rows, self.heads, self.keys].flatten(0, 1)

    def add(self, sum_BKTC: Tensor, part_NSC: Tensor) -> None:
        """Adds `part_NSC` to the block's part of a sum over keys or values."""
        part = sum_BKTC[self.rows, self.heads, self.keys]
        part.add_(part_NSC.view_as(part))

    def weights(self, q_BKGTC: Tensor, k_BKTC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the softmax of the scores (N, R, keys), and the queries (N, R, C)."""
        q_NRC, k_NSC = self.joined(q_BKGTC), self.of_keys(k_BKTC)
        like = q_NRC.new_empty(1, 1, 1).expand(*q_NRC.shape[:2], k_NSC.shape[1])  # ignored, as beta is 0
        scores_NRS = torch.baddbmm(like, q_NRC, k_NSC.transpose(1, 2), beta=0.0, alpha=scale)
        last = self.shaped(scores_NRS)[..., -self.ceiling.shape[-1] :]
        torch.minimum(last, self.ceiling, out=last)
        return torch.softmax(scores_NRS, -1, out=scores_NRS), q_NRC


def _blocks(q_BKGTC: Tensor, documents_BT: Tensor | None) -> Iterator[_Block]:
    """Yields all queries in blocks of about `_SCORES` scores."""
    batch, kv_heads, group, length, _ = q_BKGTC.shape
    most = _QUERIES if length <= _LONG else _QUERIES_OF_LONG
    size = min(most, length, max(1, _SCORES // (group * length)))
    allowed = torch.ones(size, size, dtype=torch.bool, device=q_BKGTC.device).tril()
    ceiling = torch.where(allowed, torch.inf, -torch.inf).to(q_BKGTC.dtype)
    starts_BT = None if documents_BT is None else _starts(documents_BT)
    for start in range(0, length, size):
        end = min(length, start + size)
        triangle = ceiling[: end - start, : end - start]
        for rows, heads in _portions(batch, kv_heads, max(1, _SCORES // (group * (end - start) * end))):
            queries = slice(start, end)
            if starts_BT is None:
                yield _Block(rows, heads, queries, slice(0, end), triangle)
                continue
            starts = starts_BT[rows, queries, None]
            keys = slice(int(starts[:, 0].min()), end)
            allowed = F.pad(triangle, (start - keys.start, 0), value=torch.inf)
            places = torch.arange(keys.start, end, device=starts.device)
            allowed = torch.where(places < starts, -torch.inf, allowed)
            yield _Block(rows, heads, queries, keys, allowed[:, None, None])


def _portions(batch: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Splits the key heads of all rows into equal parts of at most `most` heads: several whole rows, or part of one."""
    if most < kv_heads:
        heads = -(-kv_heads // -(-kv_heads // most))
        for row in range(batch):
            for first in range(0, kv_heads, heads):
                yield slice(row, row + 1), slice(first, first + heads)
        return
    rows = -(-batch // -(-batch // (most // kv_heads)))
    for first in range(0, batch, rows):
        yield slice(first, min(batch, first + rows)), slice(None)


def _starts(documents_BT: Tensor) -> Tensor:
    """Returns the first position of the document that each position belongs to (B, T)."""
    begins = documents_BT[:, 1:] != documents_BT[:, :-1]
    places = torch.arange(1, documents_BT.shape[1], device=documents_BT.device)
    return F.pad(torch.where(begins, places, 0), (1, 0)).cummax(1).values


def _by_key_head(q_BHTC: Tensor, k_BKTC: Tensor) -> Tensor:
    """Groups queries by their key head (B, K, H / K, T, C)."""
    batch, heads, *shape = q_BHTC.shape
    kv_heads = k_BKTC.shape[1]
    return q_BHTC.contiguous().view(batch, kv_heads, heads // kv_heads, *shape)


def _heads_last(parts_BKGTC: Tensor) -> Tensor:
    """Returns (B, T, heads, C), the layout of the projections before and after attention."""
    return parts_BKGTC.flatten(1, 2).transpose(1, 2).contiguous()
