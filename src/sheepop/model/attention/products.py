"""Causal attention of rows in bfloat16 on a CPU, by products of large blocks.

PyTorch's kernel for the CPU takes its products in small tiles, one head at a time. Where the processor multiplies
bfloat16 itself, products of many heads at once take a third of that time, the softmax between them included.
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

# Instructions for products of bfloat16, on x86: others emulate them, or have not been measured.
HAS_BFLOAT16_PRODUCTS = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

# Scores that are computed together: enough for a product to be efficient, few enough to stay in the cache.
_SCORES = 1 << 21
# Queries of a block, for rows up to a length and for longer ones. Fewer skip more of what causality forbids.
_QUERIES, _LONG, _QUERIES_OF_LONG = 128, 512, 256


class Products:
    """Causal attention of whole rows in bfloat16 on a CPU that multiplies it, within documents or not."""

    name = "products"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Any other data type or device, and everything but documents."""
        if not HAS_BFLOAT16_PRODUCTS:
            return "needs a processor with bfloat16 products (AVX-512 or AMX)"
        if kind.device.type != "cpu" or kind.dtype != torch.bfloat16:
            return f"is for bfloat16 on a CPU, not for {str(kind.dtype).removeprefix('torch.')} on {kind.device.type}"
        return missing(self.name, kind, sight) or (
            "saves nothing for a single position" if sight.num_queries == 1 else None
        )

    def prepare(self, kind: AttentionKind, sight: Sight) -> ProductsAttention:
        """Nothing but the documents is to be known."""
        return ProductsAttention(sight.documents)


@dataclass(frozen=True)
class ProductsAttention:
    """`causal_products`, among documents if their running numbers (B, T) are given."""

    documents: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numbers of the documents."""
        return () if self.documents is None else (self.documents,)

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C)."""
        score.check("products")
        scale = q_BHTC.shape[-1] ** -0.5 if score.scale is None else score.scale
        return causal_products(q_BHTC, k_BKTC, v_BKTC, scale, self.documents).transpose(1, 2)


@torch.library.custom_op("sheepop::causal_products", mutates_args=(), device_types="cpu")
def causal_products(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scale: float, documents_BT: Tensor | None = None
) -> Tensor:
    """Causal attention (B, T, H, C) by products of blocks. Scores are rounded to the data type of the queries.

    One operator for the compiler, which does not look into it: code that was compiled for the documents of one batch
    would not fit the next. Weights are computed again in the backward pass, so that nothing is kept but queries, keys
    and values.
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
    """Gradients of queries, keys and values, each (B, T, heads, C)."""
    q_BKGTC, k_BKTC, v_BKTC = _by_key_head(q_BHTC, k_BKTC), k_BKTC.contiguous(), v_BKTC.contiguous()
    gradient_BKGTC = _by_key_head(gradient_BTHC.transpose(1, 2), k_BKTC)
    # Keys and values are seen by many blocks of queries, whose parts are added up in float32.
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
    for_q, for_k, for_v = (
        heads.new_empty(heads.shape[0], heads.shape[2], heads.shape[1], heads.shape[3])
        for heads in (q_BHTC, k_BKTC, v_BKTC)
    )
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
    """Some queries of some key heads in some rows, and the keys that they see.

    The letter N counts rows times key heads, R the queries of a key head: groups times places.
    """

    rows: slice
    heads: slice
    queries: slice
    keys: slice
    ceiling: Tensor
    """Infinite where a query may look and minus infinite where not, for the last of the keys; all queries may look at
    those before them. (queries, keys), or (rows, 1, 1, queries, keys) where documents differ."""

    def of_queries(self, heads_BKGTC: Tensor) -> Tensor:
        """The part of queries, or of what belongs to queries."""
        return heads_BKGTC[self.rows, self.heads, :, self.queries]

    def joined(self, heads_BKGTC: Tensor) -> Tensor:
        """The same as (N, R, C)."""
        return self.of_queries(heads_BKGTC).flatten(0, 1).flatten(1, 2)

    def shaped(self, joined_NRC: Tensor) -> Tensor:
        """Back from `joined`: (rows, key heads, groups, queries, C)."""
        rows, size = self.rows.stop - self.rows.start, self.queries.stop - self.queries.start
        return joined_NRC.view(rows, len(joined_NRC) // rows, -1, size, joined_NRC.shape[2])

    def of_keys(self, heads_BKTC: Tensor) -> Tensor:
        """The part of keys or values (N, keys, C)."""
        return heads_BKTC[self.rows, self.heads, self.keys].flatten(0, 1)

    def add(self, sum_BKTC: Tensor, part_NSC: Tensor) -> None:
        """Adds what belongs to keys."""
        part = sum_BKTC[self.rows, self.heads, self.keys]
        part.add_(part_NSC.view_as(part))

    def weights(self, q_BKGTC: Tensor, k_BKTC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The softmax of the scores (N, R, keys), and the queries (N, R, C)."""
        q_NRC, k_NSC = self.joined(q_BKGTC), self.of_keys(k_BKTC)
        like = q_NRC.new_empty(1, 1, 1).expand(*q_NRC.shape[:2], k_NSC.shape[1])  # of no weight in the sum
        scores_NRS = torch.baddbmm(like, q_NRC, k_NSC.transpose(1, 2), beta=0.0, alpha=scale)
        last = self.shaped(scores_NRS)[..., -self.ceiling.shape[-1] :]
        torch.minimum(last, self.ceiling, out=last)
        return torch.softmax(scores_NRS, -1, out=scores_NRS), q_NRC


def _blocks(q_BKGTC: Tensor, documents_BT: Tensor | None) -> Iterator[_Block]:
    """All queries, in blocks of about `_SCORES` scores."""
    batch, kv_heads, group, length, _ = q_BKGTC.shape
    most = _QUERIES if length <= _LONG else _QUERIES_OF_LONG
    size = min(most, length, max(1, _SCORES // (group * length)))
    ceiling = _ceiling(q_BKGTC, size)
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
    """Rows and key heads, at most so many together and in parts of about equal size: whole rows, or parts of one."""
    if most < kv_heads:
        heads = -(-kv_heads // -(-kv_heads // most))
        for row in range(batch):
            for first in range(0, kv_heads, heads):
                yield slice(row, row + 1), slice(first, first + heads)
        return
    rows = -(-batch // -(-batch // (most // kv_heads)))
    for first in range(0, batch, rows):
        yield slice(first, min(batch, first + rows)), slice(None)


def _ceiling(like: Tensor, size: int) -> Tensor:
    """The largest score (size, size) that a query may give a key: none to a later one."""
    allowed = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
    return torch.where(allowed, torch.inf, -torch.inf).to(like.dtype)


def _starts(documents_BT: Tensor) -> Tensor:
    """Where in its row the document of each place begins (B, T)."""
    begins = documents_BT[:, 1:] != documents_BT[:, :-1]
    places = torch.arange(1, documents_BT.shape[1], device=documents_BT.device)
    return F.pad(torch.where(begins, places, 0), (1, 0)).cummax(1).values


def _by_key_head(q_BHTC: Tensor, k_BKTC: Tensor) -> Tensor:
    """Queries in the groups that one key head serves (B, K, H / K, T, C)."""
    batch, heads, *shape = q_BHTC.shape
    kv_heads = k_BKTC.shape[1]
    return q_BHTC.contiguous().view(batch, kv_heads, heads // kv_heads, *shape)


def _heads_last(parts_BKGTC: Tensor) -> Tensor:
    """(B, T, heads, C), as the projections before and behind attention have them."""
    return parts_BKGTC.flatten(1, 2).transpose(1, 2).contiguous()
