"""The tensor types of GGUF files: floats, and blocks of small integers that share scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sheepop.adapt.tiles import GROUP
from sheepop.checkpoint.gguf.block_decoding import DECODERS, pack
from sheepop.checkpoint.gguf.block_encoding import ENCODERS, require_storable
from sheepop.checkpoint.gguf.native_decoding import Fill, native_decoder
from sheepop.core.errors import CheckpointError

# Names of types that SheepOp does not read, for error messages.
_OTHER_TYPES = {9: "q8_1", 15: "q8_k", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"}


@dataclass(frozen=True)
class TensorType:
    """A tensor type with its number in a file, and the dtype of its tensors in memory.

    A row consists of blocks of `block` numbers in `block_bytes` bytes. `read` returns the numbers of blocks, and
    `write` their bytes, or is None for a type that SheepOp only reads; both take and return one block per row.
    `fill_stored` gives the same numbers as a `StoredWeight` stores them in groups of at most 32, without loss:
    integers, of 4 bits where these are enough, else of 8, scales, and offsets in some types. It is None for floats.
    """

    name: str
    number: int
    dtype: torch.dtype
    block: int
    block_bytes: int
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor] | None
    fill_stored: Fill | None = None

    @cached_property
    def stored_block(self) -> tuple[Tensor, ...]:
        """What `fill_stored` gives for a block of zeros, (1, n) each."""
        return stored_parts(self.name, self.block, torch.zeros(1, self.block_bytes, dtype=torch.uint8))

    def row_bytes(self, columns: int) -> int | None:
        """Returns the bytes of a row, or None if a row with this number of columns cannot have this type."""
        return None if columns % self.block else columns // self.block * self.block_bytes

    def encode(self, rows: Tensor) -> Tensor:
        """Returns the bytes (uint8, one row of bytes per row) of `rows` (N, columns).

        Raises `CheckpointError` for a number that this type cannot represent.
        """
        assert self.write is not None, self.name
        return self.write(rows.reshape(-1, self.block)).reshape(len(rows), self.row_bytes(rows.shape[-1]) or 0)

    def decode(self, content: Tensor, columns: int) -> Tensor:
        """Returns rows (N, columns) of `dtype` from their bytes (uint8, any shape)."""
        return self.read(content.reshape(-1, self.block_bytes)).reshape(-1, columns)

    def size(self, shape: tuple[int, ...]) -> int | None:
        """Returns the bytes of a tensor of `shape`, or None if its rows cannot have this type."""
        row_bytes = self.row_bytes(shape[-1] if shape else 1)
        return None if row_bytes is None else row_bytes * math.prod(shape[:-1])


def _float(name: str, number: int, dtype: torch.dtype) -> TensorType:
    def read(content: Tensor) -> Tensor:
        return content.contiguous().view(dtype)

    def write(numbers: Tensor) -> Tensor:
        converted = numbers.to(dtype)
        if (converted.isinf() & ~numbers.isinf()).any():
            raise CheckpointError(
                f"it contains {numbers.abs().max().item():g}, but the largest number of {name} is "
                f"{torch.finfo(dtype).max:g}. Choose bf16 or f32."
            )
        return converted.contiguous().view(torch.uint8)

    return TensorType(name, number, dtype, 1, dtype.itemsize, read, write)


def stored_parts(name: str, block: int, content: Tensor) -> tuple[Tensor, ...]:
    """Returns what `TensorType.fill_stored` gives for a type with blocks of `block` numbers, computed by PyTorch."""
    integers, *scalings = DECODERS[name](content)
    if name in _FOUR_BITS:
        integers = pack(integers.view(torch.uint8) & 15, 4, GROUP // 2)
    found = [part for part in scalings if part is not None]
    return integers, *(part.repeat_interleave(max(1, block // part.shape[1] // GROUP), 1) for part in found)


def _blocks(name: str, number: int, block: int, block_bytes: int) -> TensorType:
    encoder, decoder = ENCODERS.get(name), DECODERS[name]

    def write(numbers: Tensor) -> Tensor:
        assert encoder is not None
        require_storable(numbers)
        return encoder(numbers.float())

    def read(content: Tensor) -> Tensor:
        return decoder(content).numbers()

    def fill_stored(content: Tensor, parts: Sequence[Tensor]) -> None:
        if (fill := native_decoder(name)) is not None:
            fill(content, parts)
            return
        for whole, part in zip(parts, stored_parts(name, block, content), strict=True):
            whole.copy_(part)

    return TensorType(name, number, torch.float32, block, block_bytes, read, write if encoder else None, fill_stored)


F32 = _float("f32", 0, torch.float32)
F16 = _float("f16", 1, torch.float16)
BF16 = _float("bf16", 30, torch.bfloat16)
_FLOATS = (F32, F16, BF16)
_BLOCKS = (
    ("q4_0", 2, 32, 18), ("q4_1", 3, 32, 20), ("q5_0", 6, 32, 22), ("q5_1", 7, 32, 24), ("q8_0", 8, 32, 34),
    ("q2_k", 10, 256, 84), ("q3_k", 11, 256, 110), ("q4_k", 12, 256, 144), ("q5_k", 13, 256, 176),
    ("q6_k", 14, 256, 210), ("iq2_xxs", 16, 256, 66), ("iq2_xs", 17, 256, 74), ("iq3_xxs", 18, 256, 98),
    ("iq1_s", 19, 256, 50), ("iq4_nl", 20, 32, 18), ("iq3_s", 21, 256, 110), ("iq2_s", 22, 256, 82),
    ("iq4_xs", 23, 256, 136), ("iq1_m", 29, 256, 56), ("tq1_0", 34, 256, 54), ("tq2_0", 35, 256, 66),
    ("mxfp4", 39, 32, 17), ("nvfp4", 40, 64, 36), ("q1_0", 41, 128, 18), ("q2_0", 42, 64, 18),
)  # fmt: skip
# Their integers are from -8 to 7, or from 0 to 15 if there are offsets.
_FOUR_BITS = ("q1_0", "q2_0", "q4_0", "q4_1", "q2_k", "q3_k", "q4_k", "tq1_0", "tq2_0")
TYPES = {kind.name: kind for kind in (*_FLOATS, *(_blocks(*row) for row in _BLOCKS))}
BY_NUMBER = {kind.number: kind for kind in TYPES.values()}


def type_name(number: int) -> str:
    """Returns the name of the type with this number, also of types that SheepOp does not read."""
    known = BY_NUMBER.get(number)
    return known.name if known else _OTHER_TYPES.get(number, f"number {number}")


def type_of_dtype(dtype: torch.dtype) -> TensorType:
    """Returns the type that stores numbers of `dtype` exactly."""
    for kind in _FLOATS:
        if kind.dtype == dtype:
            return kind
    raise CheckpointError(f"A GGUF file cannot store tensors of {dtype} unchanged. Choose f32, f16 or bf16.")
