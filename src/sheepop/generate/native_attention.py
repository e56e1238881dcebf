"""Attention of single tokens to keys and values where they lie, by the kernel of CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sheepop.adapt.stored_weight import pointer
from sheepop.core.native import native_library
from sheepop.generate.held_blocks import HeldBlocks, Places
from sheepop.model.attention.kernel import AttentionKind, Score

_SOURCE = Path(__file__).parent / "native" / "attention.cpp"


def attends_natively(kind: AttentionKind) -> bool:
    """Whether the kernel can be had, and suits these layers."""
    return kind.device.type == "cpu" and kind.dtype == torch.float32 and native_library(_SOURCE) is not None


@cache
def attention_kernel(in_int8: bool) -> Callable[..., None]:
    """The kernel that reads keys and values of this kind where they lie; see ``attention.cpp`` for what it takes."""
    found = getattr(native_library(_SOURCE), "attend_int8" if in_int8 else "attend_float32")
    places, sizes, factors = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 7, [ctypes.c_float] * 2
    found.argtypes, found.restype = [*places, *sizes, *factors, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return found


def attend_natively(
    q_RHC: Tensor, keys: HeldBlocks, values: HeldBlocks, places: Places, score: Score, slopes: Tensor | None
) -> Tensor:
    """Attends from R tokens to the places of their texts that they see; (R, H, C)."""
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    out = q_RHC.new_empty(rows, heads, value_width)
    sinks = None if score.sinks is None else score.sinks.float().contiguous()
    held = keys.numbers, values.numbers, keys.scales, values.scales
    attention_kernel(keys.scales is not None)(
        *map(pointer, (q_RHC, *held, places.table, places.firsts, places.lasts, out)),
        *(rows, heads, kv_heads, size, width, value_width, places.table.shape[1]),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 0.0,
        pointer(slopes),
        pointer(sinks),
        torch.get_num_threads(),
    )
    return out
