"""Reads safetensors files by memory map, and writes them as a stream, one tensor at a time.

The format: eight bytes with the length of a JSON header, the header (name to dtype, shape and offsets), the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import LazyTensor, Memory, pieces
from sheepop.core.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_ALIGNMENT = 8
_PIECE = 2**24  # bytes that are read at a time
# Every reader refuses a longer header.
_LONGEST_HEADER = 100_000_000


class _OpenFile:
    """A file that stays the one that was opened at `path`, whatever comes there later."""

    def __init__(self, path: Path) -> None:
        self.path, self._number = path, os.open(path, os.O_RDONLY)
        self.memory = Memory()
        weakref.finalize(self, os.close, self._number)

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still the one at its path."""
        return os.path.samestat(os.fstat(self._number), self.path.stat())

    def read(self, count: int, offset: int) -> bytes:
        """Reads up to `count` bytes; several threads may read at a time."""
        return os.pread(self._number, count, offset)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Reads bytes straight into `memory`, as many as there are; returns their number."""
        return os.preadv(self._number, [memory], offset)


@dataclass(frozen=True)
class _StoredTensor(LazyTensor):
    """A tensor whose bytes begin at `offset` in an open file; `read` maps them."""

    file: _OpenFile
    offset: int

    def load(self) -> Tensor:
        """Reads the bytes themselves: those of a memory map would be in memory twice."""
        found = self.file.memory.take(math.prod(self.shape) * self.dtype.itemsize)
        view, offset = found.data, self.offset
        while view:
            count = self.file.read_into(view[:_PIECE], offset)
            if not count:
                raise CheckpointError(f"{self.file.path} is damaged: it became shorter while it was read.")
            view, offset = view[count:], offset + count
        return torch.from_numpy(found).view(self.dtype).view(self.shape)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a file, which must not move until they are read.

    Checks the header before allocating anything: its length, its JSON, and that the tensors fill the file without gaps.
    Raises `CheckpointError` if a check fails, or for an unsupported dtype.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        stored = _OpenFile(path)
        file: Any = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
        described = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in slices.items()}
        offsets = _offsets(stored)
        is_same = stored.is_in_place
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged, or not a safetensors file: {error}. Copy or download it again."
        ) from None
    if not is_same:
        raise CheckpointError(f"{path} was replaced by another file while it was opened. Run the command again.")
    for name, (dtype, _) in described.items():
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: the tensor {name} has the dtype {dtype}, which SheepOp does not read. "
                "Export the model in float32, float16 or bfloat16 first."
            )
    return {
        name: _StoredTensor(shape, _DTYPES[dtype], functools.partial(file.get_tensor, name), stored, offsets[name])
        for name, (dtype, shape) in described.items()
    }


def _offsets(file: _OpenFile) -> dict[str, int]:
    """Where the data of each tensor begin in a file whose header was checked."""
    (length,) = struct.unpack("<Q", file.read(8, 0))
    header = orjson.loads(file.read(length, 8))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != _METADATA}


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes `tensors` to a file, which the caller makes durable; each one is read just before it is written.

    `metadata` stand in its header. Raises `ValueError` for a tensor that has another dtype or shape when it is read.
    """
    with path.open("wb") as file:
        for part in safetensors_content(tensors, metadata):
            file.write(part)


def safetensors_content(
    tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yields what `write_safetensors` writes."""
    yield _header(tensors, metadata or {})
    for name, lazy in tensors.items():
        tensor = lazy.read()
        if (tensor.dtype, tuple(tensor.shape)) != (lazy.dtype, lazy.shape):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {lazy.dtype} {lazy.shape}")
        for piece in pieces(tensor.detach().cpu().contiguous()):
            yield piece.view(torch.uint8).numpy().data


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a file; raises `CheckpointError` if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def _header(tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {_METADATA: {"format": "pt", **metadata}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.num_bytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"The {len(tensors)} tensors are too many for one safetensors file. Choose smaller shards."
        )
    return struct.pack("<Q", len(text)) + text
