"""Reads lists of texts and blocks of the commonest quantised types of GGUF by native kernels, several times as fast."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import COUNT, POINTER, address, native_function

_SOURCE = KERNELS / "gguf_blocks.cpp"
_LENGTH = 8  # bytes that state the length of a text
_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


Fill = Callable[[Tensor, Sequence[Tensor]], object]
"""Decodes blocks of a type (B, bytes) into their parts (B, n): stored integers, scales and perhaps offsets."""

Joined = tuple[NDArray[np.uint8], NDArray[np.int64], int]
"""The bytes of n texts, the n + 1 places where each starts and the last ends, and the place in the file behind them."""


def native_decoder(kind: str, *, is_mapped: bool = False) -> Fill | None:
    """Returns the kernel for a type; None if there is no kernel for it, or none on this machine.

    If the blocks lie in a file that `is_mapped`, pages that were decoded do not stay in the memory of this process.
    """
    function = _function(kind) if kind in _KINDS else None
    if function is None:
        return None

    def fill(content: Tensor, parts: Sequence[Tensor]) -> None:
        content, page = content.contiguous(), mmap.PAGESIZE if is_mapped else 0
        numbers, scales, *offsets = (address("part", part, part.dtype, len(content), part.shape[1]) for part in parts)
        blocks = address("blocks", content, torch.uint8, *content.shape)
        function(blocks, len(content), page, numbers, scales, *offsets or [None])

    return fill


def joined_texts(content: memoryview, place: int, count: int) -> Joined | None:
    """Reads `count` texts from `place` on, each of which follows its length of 8 bytes, and joins them.

    Returns None if one would end beyond the content.
    """
    functions = _text_functions()  # what it raises must find no array over the content, which could not be closed then
    whole, begins = np.frombuffer(content, dtype=np.uint8), np.empty(count, dtype=np.int64)
    if functions is not None:
        text_places, copy_texts = functions
        end = text_places(whole.ctypes.data, len(content), place, count, begins.ctypes.data)
        if end < 0:
            return None
        text, starts = np.empty(end - place - _LENGTH * count, dtype=np.uint8), np.empty(count + 1, dtype=np.int64)
        copy_texts(whole.ctypes.data, begins.ctypes.data, count, text.ctypes.data, starts.ctypes.data)
        return text, starts, end
    end, length_at = place, struct.Struct("<Q").unpack_from
    try:
        for number in range(count):
            begins[number] = end
            end += _LENGTH + length_at(content, end)[0]
    except (struct.error, OverflowError):
        return None
    if end > len(content):
        return None
    is_text = np.ones(end - place, dtype=np.bool_)
    is_text[(begins - place)[:, None] + np.arange(_LENGTH)] = False
    return whole[place:end][is_text], np.append(begins, end) - place - _LENGTH * np.arange(count + 1), end


@cache
def _text_functions() -> tuple[Any, Any] | None:
    text_places = native_function(_SOURCE, "text_places", [POINTER, COUNT, COUNT, COUNT, POINTER], COUNT)
    copy_texts = native_function(_SOURCE, "copy_texts", [POINTER, POINTER, COUNT, POINTER, POINTER])
    return None if text_places is None else (text_places, copy_texts)


@cache
def _function(kind: str) -> Any:
    return native_function(_SOURCE, kind, [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER])
