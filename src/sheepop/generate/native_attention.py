"""Attention of single tokens to keys and values in blocks, on a CPU, in float32; see native/attention.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sheepop.adapt.stored_weight import pointer
from sheepop.core.native import native_library
from sheepop.model.attention.kernel import AttentionKind, Score

_SOURCE = Path(__file__).parent / "native" / "attention.cpp"


class NativeAttention(Protocol):
    """Attends from R tokens to the places `first` to `last` of their texts, which lie in the blocks of `table`."""

    def __call__(
        self,
        q_RHC: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        first: Tensor,
        last: Tensor,
        score: Score,
        slopes: Tensor | None,
    ) -> Tensor:
        """(R, H, C)."""  # fmt: skip


def native_attention(kind: AttentionKind) -> NativeAttention | None:
    """The kernel, where there is one for this kind of attention."""
    if kind.device.type != "cpu" or kind.dtype != torch.float32 or kind.watched or kind.dropout > 0:
        return None
    return None if native_library(_SOURCE) is None else _attend


def _attend(
    q_RHC: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    first: Tensor,
    last: Tensor,
    score: Score,
    slopes: Tensor | None,
) -> Tensor:
    library = native_library(_SOURCE)
    assert library is not None
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.shape
    out = q_RHC.new_empty(rows, heads, value_width)
    scale = width**-0.5 if score.scale is None else score.scale
    sizes = (rows, heads, kv_heads, size, width, value_width, table.shape[1])
    sinks = None if score.sinks is None else score.sinks.float().contiguous()
    library.attend(
        *map(pointer, (q_RHC, keys, values, table, first, last, out)),
        *map(ctypes.c_int64, sizes),
        ctypes.c_float(scale),
        ctypes.c_float(score.soft_cap or 0.0),
        pointer(slopes),
        pointer(sinks),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return out
