"""Attention on a GPU by one kernel that is told, in blocks, which keys each query may see (FlexAttention)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sheepop.core.machine import find_compiler

# Places in a block of the kernel, of queries and of keys.
BLOCK = 128
_NARROWEST_HEAD = 16


def block_mask(
    length: int, documents_BT: Tensor | None, window: int | None = None, device: torch.device | str = "cpu"
) -> BlockMask:
    """The blocks of keys that each block of queries needs, from the first key of each query in O(B (T / BLOCK)^2).

    A query at place q sees the places from the beginning of its document on, numbered as by `number_documents`, and at
    most `window` of them. A block whose every key is seen by every query is marked as full: the kernel does not ask for
    its single places.
    """
    device = device if documents_BT is None else documents_BT.device
    places = torch.arange(length, device=device)
    if documents_BT is None:
        firsts_BT = torch.zeros(1, length, dtype=torch.int64, device=device)
    else:
        begins = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
        firsts_BT = torch.where(begins, places, 0).cummax(1).values
    if window is not None:
        firsts_BT = firsts_BT.maximum(places - window + 1)
    # Of the first and the last query of each block: the least and the greatest of the block.
    last = places[BLOCK - 1 :: BLOCK]
    if length % BLOCK:
        last = torch.cat((last, places[-1:]))
    least, greatest = firsts_BT[:, ::BLOCK, None], firsts_BT[:, last, None]
    block = torch.arange(len(last), device=device)
    before = block[None, :] < block[:, None]
    first_key = block * BLOCK
    # Blocks of the last queries, where they are fewer than a block, are asked about the places that are not there.
    full = before & (first_key >= greatest) & (first_key[:, None] + BLOCK <= length)
    needed = (before | torch.eye(len(last), dtype=torch.bool, device=device)) & (first_key + BLOCK > least)
    shared = documents_BT is None

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = torch.zeros_like(batch) if shared else batch
        return (key <= query) & (key >= firsts_BT[row, query])

    return BlockMask.from_kv_blocks(
        *_in_order(needed & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def attend_in_blocks(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    slopes_H: Tensor | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """FlexAttention (Dong et al. 2024) under a block mask; (B, H, T, C)."""

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if slopes_H is None else score - slopes_H[head] * (query - key)

    # Inside a network that is being compiled it is compiled with the rest.
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    found = kernel(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        block_mask=mask,
        score_mod=None if soft_cap is None and slopes_H is None else changed,
        scale=scale,
        enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
        return_aux=None if sinks_H is None else AuxRequest(lse=True),
    )
    if sinks_H is None:
        return found
    # A sink adds exp(sink) to the sum of the softmax, exp(lse): the rest keeps the share sigmoid(lse - sink).
    out_BHTC, sums = found
    return out_BHTC * torch.sigmoid(sums.lse - sinks_H[:, None])[..., None].to(out_BHTC.dtype)


def has_block_kernel(device: torch.device, head_dim: int) -> bool:
    """Whether `attend_in_blocks` runs fused here: a GPU from 2020 on, Triton, and the C compiler that Triton calls."""
    return device.type == "cuda" and head_dim >= _NARROWEST_HEAD and _has_triton(device.index)


@cache
def _has_triton(index: int | None) -> bool:
    return (
        find_spec("triton") is not None
        and find_compiler() is not None
        and torch.cuda.get_device_capability(index) >= (8, 0)
    )


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are marked in each row (B, 1, rows), and the columns (B, 1, rows, columns), marked ones first."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]
