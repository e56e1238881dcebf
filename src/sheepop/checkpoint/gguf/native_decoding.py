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


Fill = Callable[[Tensor, Sequence[Tensor]], None]
"""Decodes blocks of a type (B, bytes) to their stored integers, scales and perhaps offsets (B, n), which it is given."""


def native_decoder(kind: str) -> Fill | None:
    """Returns the kernel for a type; None if there is no kernel for it, or none on this machine."""
    function = _function(kind) if kind in _KINDS else None
    if function is None:
        return None

    def fill(content: Tensor, parts: Sequence[Tensor]) -> None:
        content = content.contiguous()
        numbers, scales, *offsets = (address("part", part, part.dtype, len(content), part.shape[1]) for part in parts)
        function(address("blocks", content, torch.uint8, *content.shape), len(content), numbers, scales, *offsets or [None])

    return fill


@cache
def _function(kind: str) -> Any:
    library = native_library(_SOURCE)
    function = None if library is None else getattr(library, kind)
    if function is not None:
        pointer = ctypes.c_void_p
        function.argtypes, function.restype = [pointer, ctypes.c_int64, pointer, pointer, pointer], None
    return function
