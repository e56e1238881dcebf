"""Attention on a GPU by one kernel that is told, in blocks, which keys each query may see (FlexAttention)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sheepop.core.machine import find_compiler
from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score, missing
from sheepop.model.attention.sight import Sight

# Places in a block of the kernel, of queries and of keys.
BLOCK = 128
_NARROWEST_HEAD = 16
NEEDS = "needs an NVIDIA GPU from 2020 or later, Triton, a C compiler, and heads of at least 16 columns"
# Kinds of calls that one process may compile the kernel for: data types, widths, caps, with gradients or without.
_KINDS = 64


class Blocks:
    """FlexAttention (Dong et al. 2024): causal attention of whole rows on an NVIDIA GPU."""

    name = "blocks"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """What it cannot do, and in a free choice also what it is not worth being compiled for."""
        narrowest = min(kind.head_dim, kind.value_dim)
        if not has_block_kernel(kind.device, narrowest):
            return f"{NEEDS} (this is {kind.device.type}, with heads of {narrowest})"
        absent = missing(self.name, kind, sight)
        if absent is not None or kind.backend != "auto":
            return absent
        if kind.cached:
            return "takes longer to compile than a text takes to write"
        pays = sight.features or kind.features
        return None if pays else "saves nothing with a plain causal mask"

    def prepare(self, kind: AttentionKind, sight: Sight) -> BlocksAttention:
        """Finds the blocks that are needed."""
        return BlocksAttention(block_mask(sight), kind.slopes)


@dataclass(frozen=True)
class BlocksAttention:
    """`mask` says which blocks of keys are needed; `slopes` (H,) times the distance is taken off each score."""

    mask: BlockMask
    slopes: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The indices of the blocks."""
        mask = self.mask
        parts = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return tuple(part for part in parts if part is not None)

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C). Raises PyTorch's error where this kernel was compiled too often, and never goes without it."""
        score.check("blocks")
        soft_cap, slopes_H = score.soft_cap, self.slopes

        def changed(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if soft_cap is not None:
                value = soft_cap * torch.tanh(value / soft_cap)
            return value if slopes_H is None else value - slopes_H[head] * (query - key)

        found = _run(
            q_BHTC,
            k_BKTC,
            v_BKTC,
            block_mask=self.mask,
            score_mod=None if soft_cap is None and slopes_H is None else changed,
            scale=score.scale,
            enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
            return_aux=None if score.sinks is None else AuxRequest(lse=True),
        )
        if score.sinks is None:
            return found
        # A sink adds exp(sink) to the sum of the softmax, exp(lse): the rest keeps the share sigmoid(lse - sink).
        out_BHTC, sums = found
        return out_BHTC * torch.sigmoid(sums.lse - score.sinks[:, None])[..., None].to(out_BHTC.dtype)


def block_mask(sight: Sight) -> BlockMask:
    """The blocks of keys that each block of queries needs, from the first key of each query in O(B (T / BLOCK)^2).

    A block whose every key is seen by every query is marked as full: the kernel does not ask for its single places.
    """
    length, places, firsts_BT = sight.num_keys, sight.places(), sight.first_keys()
    # Of the first and the last query of each block: the least and the greatest of the block.
    last = places[BLOCK - 1 :: BLOCK]
    if length % BLOCK:
        last = torch.cat((last, places[-1:]))
    least, greatest = firsts_BT[:, ::BLOCK, None], firsts_BT[:, last, None]
    block = torch.arange(len(last), device=sight.device)
    before = block[None, :] < block[:, None]
    first_key = block * BLOCK
    # Blocks of the last queries, where they are fewer than a block, are asked about the places that are not there.
    full = before & (first_key >= greatest) & (first_key[:, None] + BLOCK <= length)
    needed = (before | torch.eye(len(last), dtype=torch.bool, device=sight.device)) & (first_key + BLOCK > least)
    shared = firsts_BT.shape[0] == 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = torch.zeros_like(batch) if shared else batch
        return (key <= query) & (key >= firsts_BT[row, query])

    return BlockMask.from_kv_blocks(
        *_in_order(needed & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def has_block_kernel(device: torch.device, head_dim: int) -> bool:
    """Whether `BlocksAttention` runs fused here: a GPU from 2020 on, Triton, and the C compiler that Triton calls."""
    return device.type == "cuda" and head_dim >= _NARROWEST_HEAD and _has_triton(device.index)


@cache
def _has_triton(index: int | None) -> bool:
    return (
        find_spec("triton") is not None
        and find_compiler() is not None
        and torch.cuda.get_device_capability(index) >= (8, 0)
    )


def _run(*heads: Tensor, **settings: Any) -> Any:
    # Inside a network that is being compiled it is compiled with the rest.
    if torch.compiler.is_compiling():
        kernel: Callable[..., Any] = flex_attention
        return kernel(*heads, **settings)
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
        return _compiled_flex_attention()(*heads, **settings)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Compiled once for one length and once for all others; `fullgraph` makes going without an error."""
    return torch.compile(flex_attention, fullgraph=True)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are marked in each row (B, 1, rows), and the columns (B, 1, rows, columns), marked ones first."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]
