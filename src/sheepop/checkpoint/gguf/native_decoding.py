"""Decodes blocks of the commonest quantised types of GGUF by a native kernel, several times as fast as in PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sheepop.core.native import address, native_library

_SOURCE = Path(__file__).parents[1] / "native" / "blocks.cpp"
_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def native_decoder(kind: str, parts: Sequence[Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
    """Returns the kernel that reads blocks of a type (B, bytes) as stored integers, scales and perhaps offsets.

    `parts` are those of one block. None if there is no kernel for this type, or none on this machine.
    """
    function = _function(kind) if kind in _KINDS else None
    if function is None:
        return None

    def decode(content: Tensor) -> tuple[Tensor, ...]:
        count, content = len(content), content.contiguous()
        found = tuple(part.new_empty(count, part.shape[1]) for part in parts)
        _, scales, *offsets = (address("part", part, part.dtype, *part.shape) for part in found)
        blocks = address("blocks", content, torch.uint8, *content.shape)
        function(blocks, count, found[0].data_ptr(), scales, *offsets or [None])
        return found

    return decode


@cache
def _function(kind: str) -> Any:
    library = native_library(_SOURCE)
    function = None if library is None else getattr(library, kind)
    if function is not None:
        pointer = ctypes.c_void_p
        function.argtypes, function.restype = [pointer, ctypes.c_int64, pointer, pointer, pointer], None
    return function
