"""Tensors that are read on demand, so that a model larger than memory can be converted, checked and copied."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.model import ModelConfig
from sheepop.tokenizer import Tokenizer

Shape = tuple[int, ...]
_CHUNK, _ALIGNED = 2**25, 64  # bytes of memory


@dataclass(frozen=True)
class LazyTensor:
    """Shape and dtype, known without reading, and a function that reads the values onto the CPU."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wraps a tensor that is already in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def load(self) -> Tensor:
        """Reads the values into memory that belongs to the tensor alone, not to a memory map."""
        return self.read().clone()

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the data in bytes."""
        return self.dtype.itemsize * self.count


class Memory:
    """Memory for tensors in chunks so large that NumPy asks the system for pages of 2 MB.

    A processor looks up the address of each page that it reads; with pages of 4 kB a product waits for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def take(self, count: int) -> np.ndarray:
        """Returns `count` bytes, aligned for the widest vectors. A chunk is freed with the last of its tensors."""
        with self._lock:
            if len(self._rest) < count:
                chunk = np.empty(max(count, _CHUNK) + _ALIGNED, np.uint8)
                self._rest = chunk[-chunk.ctypes.data % _ALIGNED :]
            found = self._rest[:count]
            self._rest = self._rest[-(-count // _ALIGNED) * _ALIGNED :]
        return found


def pieces(tensor: Tensor, elements: int = 2**22) -> Iterator[Tensor]:
    """Yields a contiguous tensor as one-dimensional views of limited length, so that processing needs little memory."""
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), elements):
        yield flat[start : start + elements]


def total_bytes(tensors: Mapping[str, LazyTensor]) -> int:
    """Returns the total size of the tensors in bytes."""
    return sum(tensor.num_bytes for tensor in tensors.values())


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, converted to our terms.

    `tensors` have the names and shapes of `sheepop.checkpoint.expected_tensors`. `generation` has the keys of
    ``generation_config.json``: `eos_token_id` (a number or a list) ends a text, in addition to the tokenizer's own.
    `source` describes the origin of the model, and `notes` tell the user what was left out or differs. `quantized` has
    the parts of quantised matrices, which are stored without loss: the integers by the name of the matrix, and scales
    and offsets by that name with a suffix. `place` is its directory or file, if it is still there.
    """

    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer
    generation: Mapping[str, Any]
    source: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    place: Path | None = None

    def stored(self) -> dict[str, LazyTensor]:
        """Returns all tensors, quantised matrices as their parts."""
        return with_stored(self.tensors, self.quantized)


def with_stored(
    tensors: Mapping[str, LazyTensor], quantized: Mapping[str, Mapping[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Returns `tensors`, with each quantised matrix replaced by its parts."""
    return {
        name: part for whole, tensor in tensors.items() for name, part in quantized.get(whole, {whole: tensor}).items()
    }


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Buffers, which are always float32.
_KEPT = (".router.balance",)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype called `name`, None for None; raises `UsageError` for an unknown name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known. Give one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def converted(tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Converts tensors to `dtype` (None keeps theirs); reading one raises `CheckpointError` if a number overflows."""

    def convert(name: str, tensor: LazyTensor) -> Tensor:
        source = tensor.read()
        result = source.to(dtype)
        if not _is_finite(result) and _is_finite(source):
            raise CheckpointError(
                f"{name} has numbers up to {source.abs().max().item():.4g}, too large for {dtype}. Choose bfloat16, "
                "or keep the dtype."
            )
        return result

    return {
        name: tensor
        if dtype in (None, tensor.dtype) or name.endswith(_KEPT)
        else replace(tensor, dtype=dtype, read=partial(convert, name, tensor))
        for name, tensor in tensors.items()
    }


def watched(tensors: Mapping[str, LazyTensor], not_finite: list[str]) -> dict[str, LazyTensor]:
    """Wraps tensors so that reading one that contains NaN or infinity appends its name to `not_finite`."""

    def watch(name: str, found: Tensor) -> None:
        if name not in not_finite and not _is_finite(found):
            not_finite.append(name)

    return _seen(tensors, watch)


def reported(tensors: Mapping[str, LazyTensor], advance: Callable[[float], None]) -> dict[str, LazyTensor]:
    """Wraps tensors so that reading one calls `advance` with its number of bytes."""
    return _seen(tensors, lambda name, _: advance(tensors[name].num_bytes))


def _seen(tensors: Mapping[str, LazyTensor], see: Callable[[str, Tensor], None]) -> dict[str, LazyTensor]:
    def read(name: str) -> Tensor:
        found = tensors[name].read()
        see(name, found)
        return found

    return {name: replace(tensor, read=partial(read, name)) for name, tensor in tensors.items()}


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # NaN and infinity stay in a sum, which takes a fifth of the time; large numbers may overflow in it.
    return all(
        math.isfinite(piece.sum(dtype=torch.float32).item()) or bool(piece.isfinite().all())
        for piece in pieces(tensor.contiguous())
    )
