"""Formats in which other programs store a weight in few bits: the parts of a weight, its shape, and its values.

Every format gives values in float32, and raises `ValueError` with the reason if the parts do not fit each other.
Shapes: R outputs and C inputs of a layer, G groups of inputs with one scale each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sheepop.checkpoint.given import Given
from sheepop.checkpoint.lazy_tensor import LazyTensor, Shape

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS_PER_WORD = 32
_CHUNK = 2**22
# The values of 4-bit floats with a sign, two bits of exponent and one of mantissa (OCP Microscaling 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Parts = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class Format:
    """The parts of a weight by the ends of their names, which follow the name of the layer; `target` is the weight's.

    A tensor whose name ends like that of the `codes`, with one of `dtypes`, belongs to a weight in this format, of
    which only `optional` parts may be missing. `shape` takes the parts unread, `values` read.
    """

    names: Mapping[str, str]
    dtypes: tuple[torch.dtype, ...]
    shape: Callable[[Parts], Shape]
    values: Callable[[Mapping[str, Tensor]], Tensor]
    target: str = ".weight"
    optional: tuple[str, ...] = ()


def expect(parts: Parts, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raises `ValueError` unless a part has this shape and one of these dtypes."""
    part = parts[name]
    if part.shape != shape:
        raise ValueError(f"its {name} have the shape {part.shape}, expected {shape}")
    if part.dtype not in dtypes:
        raise ValueError(f"its {name} have the dtype {str(part.dtype).removeprefix('torch.')}")


def matrix(parts: Parts) -> tuple[int, int]:
    """Returns the shape of the codes; raises `ValueError` unless they are a matrix."""
    shape = parts["codes"].shape
    if len(shape) != 2:
        raise ValueError(f"its codes have the shape {shape}, which is not that of a matrix")
    return shape[0], shape[1]


def product(codes_RC: Tensor, scales_RG: Tensor, groups: int | Tensor, zeros_RG: Tensor | None = None) -> Tensor:
    """Returns ``(codes - zeros) * scales``; `groups` is the size of a group of inputs, or the group of each (C,)."""
    columns = codes_RC.shape[1]
    found = torch.empty(codes_RC.shape)
    step = max(1, _CHUNK // max(1, columns))

    def of_inputs(part: Tensor) -> Tensor:
        if isinstance(groups, int):
            return part.float().repeat_interleave(min(groups, columns), 1)[:, :columns]
        return part.float()[:, groups]

    for start in range(0, len(codes_RC), step):
        rows = slice(start, start + step)
        part = codes_RC[rows].float()
        if zeros_RG is not None:
            part -= of_inputs(zeros_RG[rows])
        torch.mul(part, of_inputs(scales_RG[rows]), out=found[rows])
    return found


def looked_up(codes: Tensor, table: Tensor, *, lowest_first: bool = True) -> Tensor:
    """Returns the numbers (..., 2 n) of codes (..., n), which are pairs of 4 bits that select from 16 numbers."""
    pairs = torch.cartesian_prod(table, table)
    return functional.embedding(codes.int(), pairs.flip(1) if lowest_first else pairs).flatten(-2)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the unsigned numbers (..., 32 n / bits) of words (..., n), from the lowest bits on."""
    # Not contiguous(), which keeps the strides of a dimension of size 1.
    parts = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack([(parts >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1).flatten(-2)


# FP8 and INT8: one scale for each block (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3), row or matrix


def _block(codes: Shape, scales: Shape, block: tuple[int, int] | None) -> tuple[int, int]:
    rows, columns = codes
    if block is not None:
        expected = (-(-rows // block[0]), -(-columns // block[1]))
        if scales != expected:
            raise ValueError(f"its scales have the shape {scales}, expected {expected} for blocks of {block}")
        return block
    if math.prod(scales) == 1 and len(scales) <= 2:
        return rows, columns
    if scales not in ((rows, 1), (rows,)):
        raise ValueError(f"its scales have the shape {scales}, expected one for the matrix or for each of {rows} rows")
    return 1, columns


def _scaled_shape(parts: Parts, block: tuple[int, int] | None) -> Shape:
    shape = matrix(parts)
    _block(shape, parts["scales"].shape, block)
    for name in parts.keys() - {"codes"}:
        expect(parts, name, parts["scales"].shape, FLOATS if name == "scales" else (torch.int8, *_FLOAT8))
    return shape


def _scaled_values(parts: Mapping[str, Tensor], block: tuple[int, int] | None) -> Tensor:
    codes, scales = parts["codes"], parts["scales"]
    rows, columns = codes.shape
    height, width = _block((rows, columns), tuple(scales.shape), block)

    def of_rows(part: Tensor) -> Tensor:
        return part.float().reshape(-(-rows // height), -1).repeat_interleave(min(height, rows), 0)[:rows]

    zeros = of_rows(parts["zeros"]) if "zeros" in parts else None
    return product(codes, of_rows(scales), width, zeros)


def _scaled(
    scales: str, dtypes: tuple[torch.dtype, ...], block: tuple[int, int] | None, *, symmetric: bool = True
) -> Format:
    return Format(
        {"codes": ".weight", "scales": scales, "zeros": ".weight_zero_point"},
        dtypes,
        partial(_scaled_shape, block=block),
        partial(_scaled_values, block=block),
        optional=("zeros",) if symmetric else (),
    )


def _block_size(given: Given, name: str) -> tuple[int, int] | None:
    if not given.has(name):
        given.take(name, None)
        return None
    sizes = given.entries(name, int)
    if len(sizes) != 2 or min(sizes) < 1:
        raise given.problem(name, "is not the height and the width of a block")
    return sizes[0], sizes[1]


def fp8(given: Given) -> Format:
    """Returns the format of transformers' FP8."""
    return _scaled(".weight_scale_inv", _FLOAT8, _block_size(given, "weight_block_size"))


def fbgemm_fp8(given: Given) -> Format:
    """Returns the format of FBGEMM: FP8 with a scale for each row."""
    return _scaled(".weight_scale", _FLOAT8, None)


# Packed integers in groups of inputs: GPTQ (Frantar et al. 2023), AWQ (Lin et al. 2024), compressed-tensors


def _bits(given: Given, name: str, allowed: tuple[int, ...]) -> int:
    bits = given.typed(name, int)
    if bits not in allowed:
        raise given.problem(name, f"is not {' or '.join(map(str, allowed))}, which SheepOp reads")
    return int(bits)


def _group_size(given: Given) -> int | None:
    """Returns the inputs of a group, None for all."""
    size = given.typed("group_size", int, -1, optional=True)
    if size is not None and size < 1 and size != -1:
        raise given.problem("group_size", "is not a number of inputs")
    return None if size in (None, -1) else int(size)


def _groups(parts: Mapping[str, Any], columns: int, size: int | None, count: int) -> int | Tensor:
    """Returns the size of a group or the group of each input; raises `ValueError` for a group that has no scale."""
    if "groups" not in parts:
        return size or columns
    groups: Tensor = parts["groups"].long()
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise ValueError(f"its groups are {int(groups.min())} to {int(groups.max())}, but it has {count} scales")
    return groups


def _packed_shape(parts: Parts, bits: int, group_size: int | None, *, along_inputs: bool) -> Shape:
    """Words lie along the inputs (GPTQ) or the outputs (AWQ) of codes, and along the outputs of zeros."""
    per_word = _BITS_PER_WORD // bits
    columns, rows = matrix(parts)
    columns, rows = (columns * per_word, rows) if along_inputs else (columns, rows * per_word)
    count = -(-columns // (group_size or max(1, columns)))
    expect(parts, "scales", (count, rows))
    expect(parts, "zeros", (count, rows // per_word), (torch.int32,))
    if rows % per_word:
        raise ValueError(f"its {rows} outputs are no multiple of {per_word}, so that words do not hold their zeros")
    if "groups" in parts:
        expect(parts, "groups", (columns,), (torch.int32, torch.int64))
    return rows, columns


def gptq(given: Given) -> Format:
    """Returns the format of GPTQ, whose first version stores zeros less 1."""
    bits, group_size = _bits(given, "bits", (2, 4, 8)), _group_size(given)
    version = given.typed("checkpoint_format", str, "gptq", "format").lower()
    if version not in ("gptq", "gptq_v2"):
        raise given.problem("checkpoint_format", "is a layout that SheepOp does not read; it reads gptq and gptq_v2")
    for name in ("is_marlin_format", "dynamic", "rotation", "adapter"):
        if given.take(name, None):
            raise given.problem(name, "changes how weights are stored in a way that SheepOp does not read")

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        codes = _unpacked(parts["codes"].t(), bits)
        zeros = _unpacked(parts["zeros"], bits)
        if version == "gptq":
            zeros = (zeros + 1) & (2**bits - 1)
        groups = _groups(parts, codes.shape[1], group_size, len(zeros))
        return product(codes, parts["scales"].t(), groups, zeros.t())

    names = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"}
    shape = partial(_packed_shape, bits=bits, group_size=group_size, along_inputs=True)
    return Format(names, (torch.int32,), shape, values, optional=("groups",))


def awq(given: Given) -> Format:
    """Returns the format of AWQ for matrix products (gemm): a word has outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    bits, group_size = _bits(given, "bits", (4,)), _group_size(given)
    if (version := given.typed("version", str, "gemm", "format")).lower() != "gemm":
        raise given.problem("version", f"is {version}; SheepOp reads gemm")
    if not given.typed("zero_point", bool, True):
        raise given.problem("zero_point", "means that weights have no zeros, which SheepOp does not read here")

    def in_order(words: Tensor) -> Tensor:
        numbers = _unpacked(words, bits)
        return numbers.view(*numbers.shape[:-1], -1, 2, 4).transpose(-1, -2).flatten(-3)

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        codes = in_order(parts["codes"]).t().contiguous()
        return product(codes, parts["scales"].t(), group_size or codes.shape[1], in_order(parts["zeros"]).t())

    names = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"}
    shape = partial(_packed_shape, bits=bits, group_size=group_size, along_inputs=False)
    return Format(names, (torch.int32,), shape, values)


def compressed_tensors(given: Given) -> Format:
    """Returns the format of compressed-tensors: numbers of 8 bits with scales, or packed integers in groups."""
    kind = given.typed("format", str)
    for name in ("transform_config", "sparsity_config"):
        table = given.take(name, None)
        if table and not (isinstance(table, dict) and table.get("format") == "dense"):
            raise given.problem(name, "changes how weights are stored in a way that SheepOp does not read")
    groups = given.within("config_groups", given.take("config_groups"))
    found = [groups.within(name, groups.take(name)) for name in groups.unread()]
    tables = [group.within("weights", group.take("weights")) for group in found]
    if not tables or any(_described(table) != _described(tables[0]) for table in tables):
        raise given.problem("config_groups", "is not one description of all weights, the only one that SheepOp reads")
    weights = tables[0]
    strategy = weights.typed("strategy", str, "tensor")
    numbers, symmetric = weights.typed("type", str, "int"), weights.typed("symmetric", bool, True)
    if (kind, numbers) == ("pack-quantized", "int") and strategy in ("group", "channel"):
        group_size = _group_size(weights) if strategy == "group" else None
        return _pack_quantized(_bits(weights, "num_bits", (4, 8)), group_size, symmetric=symmetric)
    if kind not in ("float-quantized", "int-quantized", "naive-quantized") or strategy not in _STRATEGIES:
        raise given.problem(
            "format", f"of {numbers} with the strategy {strategy} is a layout that SheepOp does not read"
        )
    _bits(weights, "num_bits", (8,))
    dtypes = _FLOAT8 if numbers == "float" else (torch.int8,)
    block = _block_size(weights, "block_structure") if strategy == "block" else None
    return _scaled(".weight_scale", dtypes, block, symmetric=symmetric)


_STRATEGIES = ("tensor", "channel", "block")


def _described(weights: Given) -> list[Any]:
    names = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
    return [weights.take(name, None) for name in names]


def _pack_quantized(bits: int, group_size: int | None, *, symmetric: bool) -> Format:
    per_word, middle = _BITS_PER_WORD // bits, 2 ** (bits - 1)

    def shape(parts: Parts) -> Shape:
        rows, words = matrix(parts)
        expect(parts, "shape", (2,), (torch.int32, torch.int64))
        given_rows, columns = parts["shape"].read().tolist()
        if given_rows != rows or -(-columns // per_word) != words:
            raise ValueError(f"its shape is {(given_rows, columns)}, but its codes are {rows} rows of {words} words")
        count = -(-columns // (group_size or max(1, columns)))
        expect(parts, "scales", (rows, count))
        if "zeros" in parts:
            expect(parts, "zeros", (-(-rows // per_word), count), (torch.int32,))
        if "groups" in parts:
            expect(parts, "groups", (columns,), (torch.int32, torch.int64))
        return rows, columns

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        rows, columns = parts["shape"].tolist()
        codes = _unpacked(parts["codes"], bits)[:, :columns]
        scales = parts["scales"]
        # Without zeros, and in them, the number `middle` stands for 0.
        zeros = torch.full(scales.shape, middle)
        if "zeros" in parts:
            zeros = _unpacked(parts["zeros"].t(), bits).t()[:rows]
        return product(codes, scales, _groups(parts, columns, group_size, scales.shape[1]), zeros)

    names = {
        "codes": ".weight_packed", "scales": ".weight_scale", "shape": ".weight_shape", "zeros": ".weight_zero_point",
        "groups": ".weight_g_idx",
    }  # fmt: skip
    optional = ("groups", "zeros") if symmetric else ("groups",)
    return Format(names, (torch.int32,), shape, values, optional=optional)


# MXFP4: 4-bit floats in blocks of 32 with a power of two (OCP Microscaling Formats 1.0)


def mxfp4(given: Given) -> Format:
    """Returns the format of gpt-oss: experts in one tensor, which is stored with the outputs before the inputs."""

    def shape(parts: Parts) -> Shape:
        if len(codes := parts["codes"].shape) != 4 or codes[-1] != 16:
            raise ValueError(f"its codes have the shape {codes}, which is not that of blocks of 16 bytes")
        expect(parts, "scales", codes[:3], (torch.uint8,))
        return codes[0], codes[2] * 32, codes[1]

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        codes, table = parts["codes"], torch.tensor(_E2M1)
        count, rows, blocks, _ = codes.shape
        found = torch.empty(count, blocks * 32, rows)
        for expert, words in enumerate(codes):
            exponents = parts["scales"][expert].int() - 127
            found[expert] = torch.ldexp(looked_up(words, table), exponents[..., None]).flatten(1).t()
        return found

    return Format({"codes": "_blocks", "scales": "_scales"}, (torch.uint8,), shape, values, target="")
