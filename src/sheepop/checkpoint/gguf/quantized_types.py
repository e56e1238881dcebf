"""The tensor types of GGUF files: float32, float16, bfloat16, and blocks of 8-bit integers.

In ``q8_0`` 32 neighbours in a row share a float16 scale, their largest magnitude divided by 127. Each number is stored
as the nearest integer multiple of the scale before its rounding to float16, with halves rounded away from zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError

Q8_BLOCK = 32
_Q8_BYTES = 2 + Q8_BLOCK
_LARGEST_HALF = torch.finfo(torch.float16).max

# Names of types that SheepOp does not read, for error messages.
_OTHER_TYPES = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s",
    23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4", 40: "nvfp4",
}  # fmt: skip


@dataclass(frozen=True)
class TensorType(ABC):
    """A tensor type with its number in a file, and the dtype of its tensors in memory."""

    name: str
    number: int
    dtype: torch.dtype
    # The value of general.file_type for a file whose matrices are of this type.
    file_type: int

    @abstractmethod
    def row_bytes(self, columns: int) -> int | None:
        """Returns the bytes of a row, or None if a row with this number of columns cannot have this type."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Returns the bytes (uint8, one row of bytes per row) of `rows` (N, columns).

        Raises `CheckpointError` for a number that this type cannot represent.
        """

    @abstractmethod
    def decode(self, content: Tensor, columns: int) -> Tensor:
        """Returns rows (N, columns) of `dtype` from their bytes (uint8, any shape)."""

    def size(self, shape: tuple[int, ...]) -> int | None:
        """Returns the bytes of a tensor of `shape`, or None if its rows cannot have this type."""
        row_bytes = self.row_bytes(shape[-1] if shape else 1)
        return None if row_bytes is None else row_bytes * math.prod(shape[:-1])


class _Float(TensorType):
    def row_bytes(self, columns: int) -> int | None:
        return columns * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        converted = rows.to(self.dtype)
        if (converted.isinf() & ~rows.isinf()).any():
            raise CheckpointError(
                f"it contains {rows.abs().max().item():g}, but the largest number of {self.name} is "
                f"{torch.finfo(self.dtype).max:g}. Choose bf16 or f32."
            )
        return converted.contiguous().view(torch.uint8)

    def decode(self, content: Tensor, columns: int) -> Tensor:
        return content.reshape(-1).view(self.dtype).reshape(-1, columns)


class _Q8(TensorType):
    def row_bytes(self, columns: int) -> int | None:
        return None if columns % Q8_BLOCK else columns // Q8_BLOCK * _Q8_BYTES

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.float().reshape(len(rows), -1, Q8_BLOCK)
        scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
        if not bool((scales <= _LARGEST_HALF).all()):
            raise CheckpointError(
                "it contains a number that is not finite, or too large for the scale of a q8_0 block. Choose f32."
            )
        inverse = torch.where(scales == 0, 0.0, 1 / scales)
        # A scale with an infinite inverse is so small that it is stored as 0, so the integers do not matter.
        scaled = blocks * torch.where(inverse.isinf(), 0.0, inverse)
        whole = scaled.abs().floor()
        # Not floor(|x| + 0.5): in single precision that sum can round up to the next integer.
        integers = scaled.sign() * (whole + (scaled.abs() - whole >= 0.5))
        halves = scales.to(torch.float16).view(torch.uint8)
        return torch.cat((halves, integers.to(torch.int8).view(torch.uint8)), dim=-1).reshape(len(rows), -1)

    def decode(self, content: Tensor, columns: int) -> Tensor:
        blocks = content.reshape(-1, _Q8_BYTES)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(scales).reshape(-1, columns)


F32 = _Float("f32", 0, torch.float32, 0)
F16 = _Float("f16", 1, torch.float16, 1)
BF16 = _Float("bf16", 30, torch.bfloat16, 32)
Q8_0 = _Q8("q8_0", 8, torch.float32, 7)
TYPES = {kind.name: kind for kind in (F32, F16, BF16, Q8_0)}
BY_NUMBER = {kind.number: kind for kind in TYPES.values()}


def type_name(number: int) -> str:
    """Returns the name of the type with this number, also of types that SheepOp does not read."""
    known = BY_NUMBER.get(number)
    return known.name if known else _OTHER_TYPES.get(number, f"number {number}")


def type_of_dtype(dtype: torch.dtype) -> TensorType:
    """Returns the type that stores numbers of `dtype` exactly."""
    for kind in (F32, F16, BF16):
        if kind.dtype == dtype:
            return kind
    raise CheckpointError(f"A GGUF file cannot store tensors of {dtype} unchanged. Choose f32, f16 or bf16.")
