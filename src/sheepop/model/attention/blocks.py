"""Attention on a GPU by FlexAttention, whose mask lists blocks of keys for each block of queries."""

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

# Positions in a block of queries or keys.
BLOCK = 128
_NARROWEST_HEAD = 16
NEEDS = "needs an NVIDIA GPU from 2020 or later, Triton, a C compiler, and heads of at least 16 columns"
# Variants of the kernel that a process may compile: data types, widths, caps, with or without gradients.
_KINDS = 64


class Blocks:
    """FlexAttention (Dong et al. 2024): causal attention of whole rows on an NVIDIA GPU."""

    name = "blocks"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Reports missing features; if the backend is `auto`, also cases that are not worth the compilation."""
        narrowest = min(kind.head_dim, kind.value_dim)
        if not has_block_kernel(kind.device, narrowest):
            return f"{NEEDS} (this is {kind.device.type}, with heads of {narrowest})"
        absent = missing(self.name, kind, sight)
        if absent is not None or kind.backend != "auto":
            return absent
        if kind.cached:
            return "takes longer to compile than to generate a text"
        pays = sight.features or kind.features
        return None if pays else "saves nothing with a plain causal mask"

    def prepare(self, kind: AttentionKind, sight: Sight) -> BlocksAttention:
        """Builds the block mask."""
        return BlocksAttention(block_mask(sight), kind.slopes)


@dataclass(frozen=True)
class BlocksAttention:
    """`mask` lists the needed blocks of keys; ALiBi's `slopes` (H,) times the distance is subtracted from scores."""

    mask: BlockMask
    slopes: Tensor | None = None

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C). Raises PyTorch's error at the recompile limit rather than run uncompiled."""
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
        # A sink adds exp(sink) to the softmax's sum exp(lse), so the other keys keep the share sigmoid(lse - sink).
        out_BHTC, sums = found
        return out_BHTC * torch.sigmoid(sums.lse - score.sinks[:, None])[..., None].to(out_BHTC.dtype)


def block_mask(sight: Sight) -> BlockMask:
    """Returns the blocks of keys that each block of queries needs, from `Sight.first_keys` in O(B (T / BLOCK)^2).

    A block in which every query sees every key is marked as full; the kernel does not mask its single positions.
    """
    length, places, firsts_BT = sight.num_keys, sight.places(), sight.first_keys()
    # First keys do not decrease along a row: a block's first query has the least one, its last query the greatest.
    last = places[BLOCK - 1 :: BLOCK]
    if length % BLOCK:
        last = torch.cat((last, places[-1:]))
    least, greatest = firsts_BT[:, ::BLOCK, None], firsts_BT[:, last, None]
    block = torch.arange(len(last), device=sight.device)
    before = block[None, :] < block[:, None]
    first_key = block * BLOCK
    # An incomplete last block of queries is never full, because the kernel must mask its missing positions.
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
    """Whether `BlocksAttention` can run on this device; see `NEEDS` (Triton calls the C compiler)."""
    return device.type == "cuda" and head_dim >= _NARROWEST_HEAD and _has_triton(device.index)


@cache
def _has_triton(index: int | None) -> bool:
    is_installed = find_spec("triton") is not None and find_compiler() is not None
    return is_installed and torch.cuda.get_device_capability(index) >= (8, 0)


def _run(*heads: Tensor, **settings: Any) -> Any:
    # Inside a compiled network it is compiled with the rest.
    if torch.compiler.is_compiling():
        kernel: Callable[..., Any] = flex_attention
        return kernel(*heads, **settings)
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
        return _compiled_flex_attention()(*heads, **settings)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Compiles the kernel, once for one length and once for all others; `fullgraph` forbids running it uncompiled."""
    return torch.compile(flex_attention, fullgraph=True)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks each row marks (B, 1, rows), and all columns, marked first (B, 1, rows, columns)."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]
