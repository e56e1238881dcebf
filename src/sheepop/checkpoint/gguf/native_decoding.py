"""Reads lists of texts and blocks of the commonest quantised types of GGUF by native kernels, several times as fast."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.core.native import address, native_library

_SOURCE = Path(__file__).parents[1] / "native" / "blocks.cpp"
_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


Fill = Callable[[Tensor, Sequence[Tensor]], object]
"""Decodes blocks of a type (B, bytes) into their parts (B, n): stored integers, scales and perhaps offsets."""


def native_decoder(kind: str) -> Fill | None:
    """Returns the kernel for a type; None if there is no kernel for it, or none on this machine."""
    function = _function(kind) if kind in _KINDS else None
    if function is None:
        return None

    def fill(content: Tensor, parts: Sequence[Tensor]) -> None:
        content = content.contiguous()
        numbers, scales, *offsets = (address("part", part, part.dtype, len(content), part.shape[1]) for part in parts)
        function(
            address("blocks", content, torch.uint8, *content.shape), len(content), numbers, scales, *offsets or [None]
        )

    return fill


def text_places(content: memoryview, place: int, count: int) -> tuple[NDArray[np.int64], int] | None:
    """Where `count` texts begin from `place` on, with their lengths of 8 bytes before them, and where the last ends.

    None if one would end beyond the content.
    """
    if (function := _text_function()) is not None:
        begins, whole = np.empty(count, dtype=np.int64), np.frombuffer(content, dtype=np.uint8)
        end = function(whole.ctypes.data, len(content), place, count, begins.ctypes.data)
        return None if end < 0 else (begins, end)
    found, length_at = array("q"), struct.Struct("<Q").unpack_from
    try:
        for _ in range(count):
            found.append(place)
            place += 8 + length_at(content, place)[0]
    except (struct.error, OverflowError):
        return None
    return (np.asarray(found, dtype=np.int64), place) if place <= len(content) else None


@cache
def _text_function() -> Any:
    library = native_library(_SOURCE)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.text_places.argtypes, library.text_places.restype = [pointer, number, number, number, pointer], number
    return library.text_places


@cache
def _function(kind: str) -> Any:
    library = native_library(_SOURCE)
    function = None if library is None else getattr(library, kind)
    if function is not None:
        pointer = ctypes.c_void_p
        function.argtypes, function.restype = [pointer, ctypes.c_int64, pointer, pointer, pointer], None
    return function
