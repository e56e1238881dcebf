"""Attention within the documents that share a row, without a mask of T times T entries.

A document is a run of equal ids in a row. On a GPU one kernel is told, in blocks, which keys each document's queries
may see. Elsewhere the rows are cut into their documents, and documents of like length attend together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sheepop.core.machine import find_compiler

# Documents are padded to a multiple of this many places, so that those of like length share one call.
PADDING_STEP = 16
# Places in a block of the GPU's kernel, of queries and of keys.
BLOCK = 128
_NARROWEST_HEAD = 16  # of that kernel


def number_documents(document_ids: Tensor) -> Tensor:
    """The running number (B, T), int64 from 0, of the document that each place of a row belongs to."""
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(begins.long(), (1, 0)).cumsum(1)


@dataclass(frozen=True)
class Segments:
    """The documents of a batch in groups of one padded length, as indices into its B T places.

    `gather` lists the places group by group, each document followed by its padding, which repeats the document's
    last place; causal attention keeps padding behind a document from it. `scatter` (B T,) says where in that list
    each place stands, and `groups` holds the number of documents and the padded length of every group.
    """

    gather: Tensor
    scatter: Tensor
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, documents_BT: Tensor) -> Segments:
        """The segments of rows whose documents are numbered by `number_documents`."""
        numbers = documents_BT.cpu().numpy()
        begins = np.ones(numbers.shape, dtype=bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=numbers.size)
        padded = np.minimum(-(-lengths // PADDING_STEP) * PADDING_STEP, numbers.shape[1])
        order = np.argsort(padded, kind="stable")
        starts, lengths, padded = starts[order], lengths[order], padded[order]
        offsets = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
        lasts = np.repeat(lengths - 1, padded)
        gather = np.repeat(starts, padded) + np.minimum(offsets, lasts)
        scatter = np.empty(numbers.size, dtype=np.int64)
        scatter[gather[offsets <= lasts]] = np.flatnonzero(offsets <= lasts)
        sizes, counts = np.unique(padded, return_counts=True)
        device = documents_BT.device
        return cls(
            torch.from_numpy(gather).to(device),
            torch.from_numpy(scatter).to(device),
            tuple(zip(counts.tolist(), sizes.tolist(), strict=True)),
        )


def attend_in_segments(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, segments: Segments, dropout: float) -> Tensor:
    """Causal attention of every document to itself (B, H, T, C), the documents of a group in one call."""
    batch, heads, length, width = q_BHTC.shape
    sizes = [count * padded for count, padded in segments.groups]
    gathered = (
        torch.split(
            heads_BHTC.transpose(1, 2).reshape(batch * length, -1, width).index_select(0, segments.gather), sizes
        )
        for heads_BHTC in (q_BHTC, k_BKTC, v_BKTC)
    )
    outputs = []
    for group, *places in zip(segments.groups, *gathered, strict=True):
        q, k, v = (part.unflatten(0, group).transpose(1, 2) for part in places)
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=heads != k_BKTC.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outputs).index_select(0, segments.scatter)
    return out.view(batch, length, heads, width).transpose(1, 2)


def block_mask(documents_BT: Tensor) -> BlockMask:
    """The blocks of keys that each block of queries needs, found from where documents begin in O(B (T / BLOCK)^2).

    A block whose every key is before every query, in the document that they all share, is marked as full: the
    kernel does not ask for its single places.
    """
    length = documents_BT.shape[1]
    places = torch.arange(length, device=documents_BT.device)
    begins = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    starts_BT = torch.where(begins, places, 0).cummax(1).values
    # Where the documents of a block's first and last query begin: the least and the greatest of the block.
    last = places[BLOCK - 1 :: BLOCK]
    if length % BLOCK:
        last = torch.cat((last, places[-1:]))
    least, greatest = starts_BT[:, ::BLOCK, None], starts_BT[:, last, None]
    block = torch.arange(len(last), device=documents_BT.device)
    before = block[None, :] < block[:, None]
    first_key = block * BLOCK
    # Blocks of the last queries, where they are fewer than a block, are asked about the places that are not there.
    full = before & (first_key >= greatest) & (first_key[:, None] + BLOCK <= length)
    needed = (before | torch.eye(len(last), dtype=torch.bool, device=before.device)) & (first_key + BLOCK > least)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts_BT[batch, query])

    return BlockMask.from_kv_blocks(
        *_in_order(needed & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def attend_in_blocks(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention (Dong et al. 2024) under a block mask; (B, H, T, C)."""
    # Inside a network that is being compiled it is compiled with the rest.
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    out: Tensor = kernel(q_BHTC, k_BKTC, v_BKTC, block_mask=mask, enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1])
    return out


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
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are marked in each row (B, 1, rows), and the columns (B, 1, rows, columns), marked ones first."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]
