"""Attention of single tokens to keys and values where they lie, by a kernel of GPUs in Triton.

The places that a token sees are cut into parts that are read side by side (Dao et al. 2023, Flash-Decoding): one
program for each head would leave most of a GPU idle. Each part gives its largest score, its sum and its weighted sum.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from sheepop.generate.held_blocks import HeldBlocks, Places
from sheepop.model.attention.kernel import AttentionKind, Score

_TILE = 64  # places that a program reads at a time
_PROGRAMS = 512  # enough for any GPU


def attends_by_triton(kind: AttentionKind) -> bool:
    """Whether the kernel can be had where these layers are."""
    return kind.device.type == "cuda" and find_spec("triton") is not None


def attend_by_triton(
    q_RHC: Tensor, keys: HeldBlocks, values: HeldBlocks, places: Places, score: Score, slopes: Tensor | None
) -> Tensor:
    """Attends from R tokens to the places of their texts that they see; (R, H, C).

    How the work is cut depends on shapes alone, so that a pass can be recorded and replayed.
    """
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    longest = places.table.shape[1] * size
    parts = max(1, min(_PROGRAMS // (rows * kv_heads), longest // (2 * _TILE)))
    tops, sums = (q_RHC.new_empty(rows, heads, parts, dtype=torch.float32) for _ in range(2))
    sums_of_values = q_RHC.new_empty(rows, heads, parts, value_width, dtype=torch.float32)
    held = [held if held is not None else keys.numbers for held in (keys.scales, values.scales)]
    # Triton takes a second to load, and not every machine has it.
    from sheepop.generate.triton_kernel import attend

    attend[(rows, kv_heads, parts)](
        *(q_RHC, keys.numbers, values.numbers, *held, places.table, places.firsts, places.lasts),
        q_RHC if slopes is None else slopes,
        *(tops, sums, sums_of_values, kv_heads, places.table.shape[1], parts),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 1.0,
        GROUP=heads // kv_heads,
        SIZE=size,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        TILE=_TILE,
        **_powers(GROUPS=heads // kv_heads, COLUMNS=width, VALUE_COLUMNS=value_width),
        IN_INT8=keys.scales is not None,
        CAPPED=score.soft_cap is not None,
        SLOPED=slopes is not None,
    )
    top = tops.amax(-1, keepdim=True)
    if score.sinks is not None:  # one more score, whose weight goes nowhere
        top = top.maximum(score.sinks.float()[:, None])
    shares = (tops - top).exp()
    total = (sums * shares).sum(-1, keepdim=True)
    if score.sinks is not None:
        total = total + (score.sinks.float()[:, None] - top).exp()
    return ((sums_of_values * shares[..., None]).sum(-2) / total).to(q_RHC.dtype)


def _powers(**sizes: int) -> dict[str, int]:
    """The next powers of two, which Triton's vectors need."""
    return {name: 1 << (size - 1).bit_length() for name, size in sizes.items()}
