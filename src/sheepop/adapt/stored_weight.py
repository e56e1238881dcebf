"""A weight tensor stored in another format, such as int4, which the network uses like an ordinary parameter.

Matrix products and row look-ups read the stored format directly; every other operation gets the dequantised tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from sheepop.adapt.tiles import GROUP, TILE, rows_of, tiles_of, units, unpacked_int4
from sheepop.adapt.tiles import SOURCE as SOURCE_OF_INTEGERS
from sheepop.core.device import has_fp8
from sheepop.core.kernel_build import KERNELS
from sheepop.core.memory_placement import copied_by_threads
from sheepop.core.native import COUNT, POINTER, Loaded, address, load_kernel, name_of, native_function, native_library
from sheepop.model.experts.grouped_product import grouped_product
from sheepop.model.fused import fuses
from sheepop.model.logits import product_back
from sheepop.model.native_scoring import matrix_rows

Format = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
Parts = tuple[Tensor, Tensor | None, Tensor | None]
"""Numbers, scales and offsets."""

_SOURCE, _ROUNDED_INTEGERS = KERNELS / "linear.cpp", KERNELS / "rounded_integers.cpp"
_MOST_ROWS = 128  # if more rows have a kernel of their own, whose sums have another order
_PIECE = 2**20  # weights that are dequantised at a time for a product
ALIGNED, _MOST_ROWS_ON_GPU = 16, 64  # numbers of a row that native kernels process at a time; rows of x for Triton


class Linear(ctypes.Structure):
    """A product with a stored matrix as native code sees it; ``native.h`` describes the fields."""

    _fields_ = [
        *((name, POINTER) for name in ("round", "multiply", "weights", "scales", "offsets", "bias")),
        *((name, COUNT) for name in ("inputs", "outputs")),
    ]


class StoredWeight(Tensor):
    """A matrix (N, K), or those of E experts (E, N, K), of data type `dtype`, stored in `numbers` and `scales`.

    `float32`, `bfloat16` and `float16` store the matrix itself, without scales. `int8` and `fp8` (e4m3) have (N, K)
    numbers, and `int4` has (N, K / 2) bytes: of 32 neighbours, byte i of 16 has weight i in its lower half and
    weight i + 16 in its upper half, as integers from -8 to 7, or from 0 to 15 if there are offsets.

    A weight is its number times a scale, plus an offset if there are `offsets`. Scales are float32 (N,) for whole rows
    of int8 and fp8, or float32 or bfloat16 (N, groups) for groups of neighbours in a row; offsets are like scales.

    On a CPU integers lie in the tiles of rows that ``integers.cpp`` reads, which takes no more memory.
    """

    stored: Format
    num_rows: int
    row_length: int
    group: int | None
    """The number of neighbours that share a scale, or None if whole rows do or there is none."""
    always_native: bool = False
    wants_rounding: bool = False
    """Whether products round their inputs to the kind of the numbers, where a kernel does that faster."""
    _parts: Parts
    _in_tiles: bool
    _dtype: torch.dtype

    @staticmethod
    def __new__(
        cls,
        stored: Format,
        values: Tensor,
        scales: Tensor | None,
        dtype: torch.dtype,
        offsets: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> StoredWeight:
        """Wraps `values`, the stored rows, as a tensor of the full shape; may arrange all parts anew `in_place`."""
        length = values.shape[-1] * (2 if stored == "int4" else 1)
        parts: Parts = values, scales, offsets
        in_tiles = values.device.type == "cpu" and stored in ("int8", "int4") and length % ALIGNED == 0
        if in_tiles:
            if scales is not None and scales.ndim == values.ndim:
                scales, offsets = (part if part is None else tiles_of(part, in_place=in_place) for part in parts[1:])
            parts = tiles_of(units(values), in_place=in_place).view(values.dtype), scales, offsets
        return cls._wrapped(stored, parts, values.shape[-2], length, dtype, in_tiles)

    @classmethod
    def _wrapped(
        cls, stored: Format, parts: Parts, num_rows: int, length: int, dtype: torch.dtype, in_tiles: bool
    ) -> StoredWeight:
        numbers, scales, _ = parts
        shape = (*numbers.shape[: -3 if in_tiles else -2], num_rows, length)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=numbers.device, requires_grad=False)
        made.stored, made._parts, made._in_tiles, made._dtype = stored, parts, in_tiles, dtype
        made.num_rows, made.row_length = num_rows, length  # reading the shape of a tensor subclass is slow
        has_groups = scales is not None and scales.ndim == numbers.ndim
        made.group = length // scales.shape[-2 if in_tiles else -1] if scales is not None and has_groups else None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({self.stored}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The data type of the matrix; PyTorch's own attribute would take a microsecond."""
        return self._dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the parts."""
        return self._parts[0].device

    @property
    def parts(self) -> Parts:
        """The numbers, the scales and the offsets of the rows."""
        return self._rows_of_parts(slice(0, self.num_rows))

    @property
    def has_scales(self) -> bool:
        """Whether there are scales."""
        return self._parts[1] is not None

    @property
    def stored_bytes(self) -> int:
        """The bytes of memory that the matrix takes."""
        return sum(part.nbytes for part in self.memory)

    def _rows_of_parts(self, index: Tensor | slice) -> Parts:
        """The numbers, the scales and the offsets of rows, at first in the shape of `index`."""
        if isinstance(index, slice):
            index = slice(*index.indices(self.num_rows)[:2])
        is_all = isinstance(index, slice) and index == slice(0, self.num_rows)
        numbers, scales, offsets = self._parts
        if not self._in_tiles or self.group is None:
            scales, offsets = (part if part is None or is_all else part[index] for part in (scales, offsets))
        else:
            scales, offsets = (part if part is None else rows_of(part, index) for part in (scales, offsets))
        if self._in_tiles:
            return rows_of(numbers.view(torch.int32), index).view(numbers.dtype), scales, offsets
        return numbers if is_all else numbers[index], scales, offsets

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that the matrix is stored in."""
        return [part for part in self._parts if part is not None]

    def move_to_threads(self) -> None:
        """Copies all parts to memory near the threads that read them, before the first product."""
        parts = (part if part is None else copied_by_threads(part, are_experts=self.ndim > 2) for part in self._parts)
        self._parts = cast(Parts, tuple(parts))

    def part(self, number: int, count: int, dimension: int) -> StoredWeight:
        """Returns one of `count` parts along a dimension, cut as by ``torch.chunk`` and as exact as the whole.

        Raises `ValueError` for columns that divide a group with one scale, or the bytes of int4.
        """
        unit = max(GROUP if self.stored == "int4" else 1, self.group or 1)
        if dimension == self.ndim - 1 and self.row_length % (count * unit):
            raise ValueError(f"rows of {self.row_length} numbers in {self.stored} have no {count} equal parts")
        numbers, *factors = (  # copies, because views would keep the memory of the whole
            part if part is None or part.ndim <= dimension else part.chunk(count, dimension)[number].clone()
            for part in self.parts
        )
        assert numbers is not None
        return StoredWeight(self.stored, numbers, factors[0], self.dtype, factors[1])

    def rows(self, index: Tensor | slice | None = None) -> Tensor:
        """Returns the dequantised matrix, or its rows (..., K) at `index` (...)."""
        values, scales, offsets = self._rows_of_parts(slice(0, self.num_rows) if index is None else index)
        if scales is None:
            return values.to(self.dtype)
        if self.stored == "int4":
            values = unpacked_int4(values, is_signed=offsets is None)
        wide = values.float() if self.stored == "fp8" else values
        if self.group is None:
            return (wide * scales[..., None]).to(self.dtype)
        found = torch.unflatten(wide, -1, (-1, self.group)) * scales.float()[..., None]
        if offsets is not None:
            found += offsets.float()[..., None]
        return found.flatten(-2).to(self.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x W^T + b`` for x (..., K), with a gradient for x if needed."""
        if x.requires_grad and torch.is_grad_enabled():
            found = _Product.apply(x, self)  # type: ignore[no-untyped-call]
            return found if bias is None else found + bias
        count = x.numel() // self.row_length
        if count == 0:
            return x.new_empty(*x.shape[:-1], self.num_rows)
        if x.device.type == "cuda" and count <= _MOST_ROWS_ON_GPU and self.is_for_triton():
            return self.product_by_triton(x, bias)
        many = count > self.most_native_rows
        is_native = x.device.type == "cpu" and x.dtype != torch.float64 and self.kernel is not None
        if not is_native or (many and self.has_scales):
            return self.product_by_torch(x, bias)
        if x.shape[-1] != self.row_length:
            raise ValueError(f"x has rows of {x.shape[-1]} numbers, the matrix of {self.row_length}")
        rows_MK, single_bias = x.float().contiguous(), None if bias is None else bias.float().contiguous()
        # NumPy asks for large pages, which come several times as fast, for the logits of each step of many texts.
        out_MN = torch.from_numpy(np.empty((*x.shape[:-1], self.num_rows), np.float32))
        found = self._plain if bias is None and not many else self.described(single_bias, many=many)
        _run()(ctypes.byref(found), rows_MK.data_ptr(), out_MN.data_ptr(), count, torch.get_num_threads())
        return out_MN.to(x.dtype)

    def described(self, bias: Tensor | None, *, many: bool = False) -> Linear:
        """Describes the product with this matrix, which must have a kernel, to native code; it may be for many rows.

        Raises `ValueError` if a part of it has another shape than the kernel assumes.
        """
        kernel = _kernel(f"{self.stored}_many") if many else self.kernel
        assert kernel is not None
        (codes, *factors), rows, length = self._parts, self.num_rows, self.row_length
        tiles, num_units = -(-rows // TILE), length // (8 if self.stored == "int4" else 4)
        shape = (tiles, num_units, 4 * TILE) if self._in_tiles else (rows, length)
        has_groups = self._in_tiles and self.group is not None
        of_factors = (tiles, length // (self.group or 1), TILE) if has_groups else (rows,)
        parts = (
            address("numbers", codes, codes.dtype, *shape),
            *(None if part is None else address("scales", part, part.dtype, *of_factors) for part in factors),
            address("bias", bias, torch.float32, rows),
        )
        return Linear(*kernel, *parts, length, rows)

    @cached_property
    def _plain(self) -> Linear:
        return self.described(None)  # which stays, since the matrix never changes

    def product_by_torch(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the product with PyTorch's kernels, on a CPU dequantising a part of the matrix at a time."""
        size = max(1, _PIECE // self.row_length)
        if x.device.type != "cpu" or self._parts[0].dtype == x.dtype or size >= self.num_rows:
            return F.linear(x, self.rows().to(x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], self.num_rows)
        for begin in range(0, self.num_rows, size):
            place = slice(begin, begin + size)
            out[..., place] = F.linear(x, self.rows(place).to(x.dtype), None if bias is None else bias[place])
        return out

    def product_by_triton(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the product of a few rows with a Triton kernel that reads the stored format."""
        from sheepop.adapt.triton_kernels import product  # takes a second, and not every machine has it

        return product(x, self.parts, bias, is_int4=self.stored == "int4")

    def grouped_product(self, rows_MK: Tensor, ends_E: Tensor) -> Tensor:
        """Returns ``rows W[e]^T`` (M, N) for the rows of each expert e, which end at `ends_E[e]`."""
        ends = ends_E.tolist()
        parts = [
            self.of_expert(expert).product(rows_MK[begin:end])
            for expert, (begin, end) in enumerate(pairwise((0, *ends)))
            if end > begin
        ]
        return torch.cat(parts) if parts else rows_MK.new_empty(0, self.num_rows)

    def is_for_triton(self) -> bool:
        """Whether a Triton kernel for the stored format runs on this GPU."""
        fits = self.has_scales and self.group == (GROUP if self.stored == "int4" else None)
        return fits and (self.stored != "fp8" or has_fp8(self.device)) and fuses(self.device.type)

    @cached_property
    def kernel(self) -> tuple[int | None, int] | None:
        """The native functions `round`, or None, and `multiply` for the stored format (see ``native.h``), or None."""
        if self.row_length % ALIGNED or self.stored == "fp8":
            return None
        return self._rounding_kernel or _kernel(self._form)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs, because that is wanted and there is a kernel."""
        return self._rounding_kernel is not None

    @property
    def _rounding_kernel(self) -> tuple[int | None, int] | None:
        unit = 2 * ALIGNED if self.stored == "bfloat16" else ALIGNED  # a lane adds two products of bfloat16
        fits = self.wants_rounding and self.row_length % unit == 0
        return _kernel(f"{self._form}_rounded") if fits else None

    @cached_property
    def _form(self) -> str:
        """The format and the kind of scales of groups, as the names of kernels have them."""
        scales = self._parts[1]
        return self.stored + ("" if scales is None or self.group is None else f"_{self.group}_{name_of(scales.dtype)}")

    @cached_property
    def most_native_rows(self) -> float:
        """The most rows of a product whose sums do not depend on their number."""
        if self.kernel is None:
            return 0
        if self.always_native or self.rounds_inputs:
            return math.inf
        if self.group is not None:
            return _most_rows_of_groups()
        return math.inf if _kernel(f"{self.stored}_many") is None else _MOST_ROWS

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(weight := _argument(args, kwargs, 1, "weight"), cls):
            return weight.product(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "bias"))
        if function is F.embedding and isinstance(weight := _argument(args, kwargs, 1, "weight"), cls):
            return weight.rows(_argument(args, kwargs, 0, "input"))
        if function is matrix_rows:
            return args[0].rows(args[1])
        if function is grouped_product:
            return args[1].grouped_product(args[0], args[2])
        if function is Tensor.detach:  # whose dispatch would load torch.distributed.tensor, which takes a second
            return args[0].computing_in(args[0].dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return args[0].computing_in(args[0].dtype)
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            numbers, scales, offsets = (
                part if part is None else part.to(kwargs.get("device") or part.device) for part in args[0].parts
            )
            return cls(args[0].stored, numbers, scales, args[0].dtype, offsets)
        # Inference mode dispatches this call even if it changes nothing; other modes only if the type changes.
        if function is torch.ops.aten.to.dtype and args[1] == args[0].dtype:
            return args[0]
        if function._schema.is_mutable:
            raise TypeError(f"{function} would change a {cls.__name__}, which is immutable")
        args, kwargs = tree_map(lambda value: value.rows() if isinstance(value, cls) else value, (args, kwargs))
        return function(*args, **kwargs)

    def computing_in(self, dtype: torch.dtype, parts: Parts | None = None) -> StoredWeight:
        """The same matrix, or one with other `parts`, of another data type."""
        made = self._wrapped(self.stored, parts or self._parts, self.num_rows, self.row_length, dtype, self._in_tiles)
        made.always_native, made.wants_rounding = self.always_native, self.wants_rounding
        return made

    def of_expert(self, expert: int) -> StoredWeight:
        """The matrix (N, K) of one of the experts."""
        parts = tuple(part if part is None else part[expert] for part in self._parts)
        return self.computing_in(self.dtype, cast(Parts, parts))


class _Product(torch.autograd.Function):
    """A product whose backward pass dequantises the matrix again, some rows at a time, instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: StoredWeight) -> Tensor:
        ctx.weight = weight
        with torch.no_grad():
            return weight.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return product_back(gradient, ctx.weight), None


@cache
def _kernel(name: str) -> tuple[int | None, int] | None:
    """The native functions for a stored format and the form of its scales, or None if there are none."""
    of_integers = _ROUNDED_INTEGERS if name.endswith("_rounded") else SOURCE_OF_INTEGERS
    library = native_library(of_integers if name.startswith("int") else _SOURCE)
    found = (getattr(library, f"{kind}_{name}", None) for kind in ("round", "multiply"))
    rounding, multiply = (function and ctypes.cast(function, POINTER).value for function in found)
    return None if multiply is None or native_library(_SOURCE) is None else (rounding, multiply)


@cache
def _most_rows_of_groups() -> int:
    return int(native_function(SOURCE_OF_INTEGERS, "most_rows_of_groups", [], COUNT)())


@cache
def _run() -> Any:
    return native_function(_SOURCE, "run_linear", [POINTER, POINTER, POINTER, COUNT, COUNT])


def has_kernels() -> bool:
    """Whether this machine has, or can compile, the native kernels."""
    return native_library(_SOURCE) is not None


def kernels_here() -> Loaded:
    """The native kernels of this machine, compiled now if they must be, or why there are none."""
    return load_kernel(_SOURCE)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
