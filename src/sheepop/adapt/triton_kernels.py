"""Triton kernels for products with 8-bit or 4-bit weights; this module is imported only on a GPU.

A program multiplies ROWS rows of weights by all inputs, at most MOST. Every data type of the inputs represents 8-bit
numbers exactly; scales multiply the float32 sums.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32  # of weights in a program


def product(
    x: Tensor, numbers: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None, *, is_int4: bool
) -> Tensor:
    """Computes ``x W^T + b`` for x (..., K), which has few rows, and the parts of a stored weight W (N, K)."""
    num_rows, length = len(numbers), x.shape[-1]
    rows = x.reshape(-1, length).contiguous()
    y = x.new_empty(len(rows), num_rows)
    # The kernels multiply tiles of at least 16 rows.
    most = max(16, 1 << (len(rows) - 1).bit_length())
    kernel, weights, sizes = row_product, [numbers, scales], {"STEP": 128}
    if is_int4:
        kernel, sizes = int4_product, {"HALF": numbers.shape[-1] // scales.shape[-1], "OFFSET": offsets is not None}
        weights.append(scales if offsets is None else offsets)
    kernel[(-(-num_rows // _ROWS),)](
        *(rows, *weights, scales if bias is None else bias, y, len(rows), length, num_rows),
        **{"MOST": most, "ROWS": _ROWS, "BIASED": bias is not None, **sizes},
    )
    return y.view(*x.shape[:-1], num_rows)


@triton.jit
def row_product(
    x, weights, scales, bias, y, num_inputs, length, num_rows,
    MOST: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Computes ``x W^T + b`` for x (M, K) and W (N, K) in int8 or fp8 with a scale for each row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, MOST)
    total = tl.zeros((MOST, ROWS), tl.float32)
    for begin in range(0, length, STEP):
        column = begin + tl.arange(0, STEP)
        part = tl.load(
            x + inputs[:, None] * length + column[None, :],
            mask=(inputs < num_inputs)[:, None] & (column < length)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + rows[None, :].to(tl.int64) * length + column[:, None],
            mask=(rows < num_rows)[None, :] & (column < length)[:, None],
            other=0.0,
        )
        total += tl.dot(part, weight.to(part.dtype), input_precision="ieee")
    total *= tl.load(scales + rows, mask=rows < num_rows, other=0.0)[None, :]
    _finish(total, bias, y, inputs, rows, num_inputs, num_rows, BIASED)


@triton.jit
def int4_product(
    x, weights, scales, offsets, bias, y, num_inputs, length, num_rows,
    MOST: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Computes ``x W^T + b`` for int4 W with a scale, and perhaps an offset, for every 2 HALF weights.

    Their byte i has weights i and i + HALF, signed unless there is an offset.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inputs, half = tl.arange(0, MOST), tl.arange(0, HALF)
    groups = length // (2 * HALF)
    total = tl.zeros((MOST, ROWS), tl.float32)
    for group in range(groups):
        at = x + inputs[:, None] * length + (group * 2 * HALF + half)[None, :]
        low = tl.load(at, mask=(inputs < num_inputs)[:, None], other=0.0)
        high = tl.load(at + HALF, mask=(inputs < num_inputs)[:, None], other=0.0)
        codes = tl.load(
            weights + (rows[None, :].to(tl.int64) * groups + group) * HALF + half[:, None],
            mask=(rows < num_rows)[None, :],
            other=0,
        ).to(tl.int32)
        first, second = codes & 15, codes >> 4
        if not OFFSET:
            first, second = (first ^ 8) - 8, (second ^ 8) - 8
        found = tl.dot(low, first.to(low.dtype), input_precision="ieee")
        found += tl.dot(high, second.to(high.dtype), input_precision="ieee")
        scale = tl.load(scales + rows.to(tl.int64) * groups + group, mask=rows < num_rows, other=0.0)
        total += found * scale.to(tl.float32)[None, :]
        if OFFSET:
            offset = tl.load(offsets + rows.to(tl.int64) * groups + group, mask=rows < num_rows, other=0.0)
            sums = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
            total += sums[:, None] * offset.to(tl.float32)[None, :]
    _finish(total, bias, y, inputs, rows, num_inputs, num_rows, BIASED)


@triton.jit
def _finish(total, bias, y, inputs, rows, num_inputs, num_rows, BIASED: tl.constexpr):
    if BIASED:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    mask = (inputs < num_inputs)[:, None] & (rows < num_rows)[None, :]
    tl.store(y + inputs[:, None] * num_rows + rows[None, :], total.to(y.dtype.element_ty), mask=mask)
