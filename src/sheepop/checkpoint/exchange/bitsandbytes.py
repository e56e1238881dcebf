"""Weights as bitsandbytes stores them: 4 bits by a table, or 8 bits with a scale for each row.

Dettmers et al. 2023, "QLoRA", section 3; Dettmers et al. 2022, "LLM.int8()", section 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint.exchange.quantised_formats import FLOATS, Format, Parts, expect, looked_up, matrix, product
from sheepop.checkpoint.given import Given, shown
from sheepop.checkpoint.lazy_tensor import LazyTensor, Shape

_LARGEST_STATE = 2**16


def bitsandbytes(given: Given) -> Format:
    """Returns the format of 4 or of 8 bits."""
    if given.typed("load_in_4bit", bool, False):
        names = {name: f".weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
        states = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
        optional = ("nested_absmax", "nested_quant_map", *states)
        names = {"codes": ".weight", **names, **states}
        return Format(names, (torch.uint8,), _table_shape, _table_values, optional=optional)
    if not given.typed("load_in_8bit", bool, False):
        raise given.problem("load_in_8bit", "and load_in_4bit are both off, so that nothing tells the format")

    def shape(parts: Parts) -> Shape:
        rows, columns = matrix(parts)
        expect(parts, "scales", (rows,))
        if "layout" in parts and (parts["layout"].count != 1 or int(parts["layout"].read())):
            raise ValueError("its weight_format is not that of plain rows, the only one that SheepOp reads")
        return rows, columns

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts["codes"]
        scales = parts["scales"].float()[:, None]
        return product(codes, scales, codes.shape[1]).mul_(1 / 127)

    names = {"codes": ".weight", "scales": ".SCB", "layout": ".weight_format"}
    return Format(names, (torch.int8,), shape, values, optional=("layout",))


def _state(parts: Mapping[str, Any]) -> tuple[Shape, int, int, float]:
    """Returns a weight's shape, the numbers of a scale, the scales of an outer scale, and what is added to a scale."""
    found = [parts[kind] for kind in ("nf4", "fp4") if kind in parts]
    if len(found) != 1:
        raise ValueError("it has not exactly one quant_state")
    data = found[0].read() if isinstance(found[0], LazyTensor) else found[0]
    if data.numel() > _LARGEST_STATE or data.dtype != torch.uint8:
        raise ValueError("its quant_state is too large, or not text")
    try:
        state = json.loads(bytes(data.flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError("its quant_state is not a JSON object")
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    sizes = [state.get("blocksize"), state.get("nested_blocksize", 1)]
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in (*shape, *sizes)):
        raise ValueError(f"its quant_state has the shape {shown(shape)} and blocks of {shown(sizes)}")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise ValueError(f"its quant_state has the offset {shown(offset)}")
    return tuple(shape), sizes[0], sizes[1], float(offset)


def _table_shape(parts: Parts) -> Shape:
    shape, size, outer_size, _ = _state(parts)
    count = math.prod(shape)
    if parts["codes"].count != -(-count // 2):
        raise ValueError(f"its codes are {parts['codes'].count} bytes, which is not half of the shape {shape}")
    scales = -(-count // size)
    expect(parts, "quant_map", (16,))
    nested = "nested_absmax" in parts
    expect(parts, "absmax", (scales,), (torch.uint8,) if nested else FLOATS)
    if nested != ("nested_quant_map" in parts):
        raise ValueError("it has only one of nested_absmax and nested_quant_map")
    if nested:
        expect(parts, "nested_absmax", (-(-scales // outer_size),))
        expect(parts, "nested_quant_map", (256,))
    return shape


def _table_values(parts: Mapping[str, Tensor]) -> Tensor:
    shape, size, outer_size, offset = _state(parts)
    scales = parts["absmax"]
    if "nested_absmax" in parts:
        outer = parts["nested_absmax"].float().repeat_interleave(min(outer_size, len(scales)))[: len(scales)]
        scales = parts["nested_quant_map"].float()[scales.int()] * outer + offset
    codes, table = parts["codes"].flatten(), parts["quant_map"].float()
    count = math.prod(shape)
    numbers = looked_up(codes, table, lowest_first=False)[:count]
    return numbers.mul_(scales.float().repeat_interleave(min(size, count))[:count]).view(shape)
