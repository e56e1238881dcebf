"""Reads and writes the GGUF container: metadata, the list of tensors, and their bytes.

A file has the magic number ``GGUF``, a version, the counts of tensors and metadata, the metadata as key-value pairs,
then for each tensor its name, its sizes (innermost first), its type number and the offset of its bytes, counted from
the first multiple of ``general.alignment`` after the list. SheepOp reads versions 2 and 3 in little endian, and writes
version 3.

The format has no checksum, so SheepOp adds one to its files: the SHA-256 of the whole file with zeros in place of the
checksum. A program that converts the file to another type (``llama-quantize``) copies unknown metadata, so the entry
also contains the file type for which the checksum is valid.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from sheepop.checkpoint.gguf.metadata import Cursor, Value, ValueType, encoded_text, read_text, read_value, value_of
from sheepop.checkpoint.gguf.native_decoding import Fill, native_decoder
from sheepop.checkpoint.gguf.quantized_types import BY_NUMBER, TYPES, TensorType, type_name
from sheepop.core.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
_ALIGNMENT_KEY = "general.alignment"
_LONGEST_NAME = 63
_LONGEST_KEY = 2**16 - 1
_LARGEST_ALIGNMENT = 2**16
_MOST_DIMENSIONS = 4
_MOST_VALUES = 2**16
_MOST_TENSORS = 2**17
_DIGEST_SIZE = 64
CHECKSUM_KEY = "sheepop.checksum"
FILE_TYPE_KEY = "general.file_type"
_CHECKSUM = re.compile(r"file type (\d+), SHA-256 ([0-9a-f]{64})")
_CHUNK = 2**24
# Linux otherwise refuses to map a file larger than its memory privately. Python 3.13 has a name for this flag.
_PRIVATE = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
# How many numbers of a tensor are decoded at a time.
_PIECE = 2**18
_RELEASED = 2**21  # bytes of the file that are given back at a time
# The least number of bytes of an entry in either list.
_SMALLEST_ENTRY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class TensorRecord:
    """The position and size in bytes of a tensor in a mapped file; `shape` is in torch's order, outermost first."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    start: int
    size: int
    file: mmap.mmap


class Container:
    """An open GGUF file, whose structure is checked without reading the tensors. Close it, or use it in a `with`.

    Raises `CheckpointError` if the file is missing, damaged, or has an unsupported version or type. All sizes in the
    file are compared with its length before they are used.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._is_closed = Path(path), False
        self._map = _map(self.path)
        try:
            with memoryview(self._map) as content:
                cursor = Cursor(content, self.path)
                num_tensors, num_values = _read_head(cursor)
                self.metadata, self._ends = _read_metadata(cursor, num_values)
                records = _read_records(cursor, num_tensors, self._alignment(cursor), self._map)
            # The list of a large vocabulary need not stay in the memory of this process beside the weights.
            self._map.madvise(mmap.MADV_DONTNEED)
            self.tensors = {record.name: record for record in records}
            self._absorbed: list[Container] = []
        except BaseException:
            with suppress(BufferError):
                self._map.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the memory map; tensors that were read stay valid, and floats among them keep it open."""
        self._is_closed = True
        with suppress(BufferError):
            self._map.close()
        for part in self._absorbed:
            part.close()

    def absorb(self, part: Container) -> None:
        """Adds the tensors of another file, which is closed together with this one."""
        self.tensors |= part.tensors
        self._absorbed.append(part)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Returns the tensor, or some of its `rows`, in the in-memory dtype of its type; floats as they are mapped."""
        content, shape = self._content(name, rows)
        kind = self.tensors[name].kind
        if kind.fill_stored is None and content.data_ptr() % kind.dtype.itemsize == 0:
            return content.view(kind.dtype).view(shape)
        numbers = self._blocks(len(content) // kind.block_bytes, torch.empty(1, kind.block, dtype=kind.dtype))
        self._decode(name, content, [numbers], lambda blocks, parts: parts[0].copy_(kind.read(blocks)))
        return numbers.view(shape)

    def read_stored(self, name: str, rows: slice | None = None) -> tuple[Tensor, ...]:
        """Returns a quantised tensor of at least one dimension, or `rows`, as integers, scales and perhaps offsets."""
        content, shape = self._content(name, rows)
        kind = self.tensors[name].kind
        assert kind.fill_stored is not None, name
        parts = [self._blocks(len(content) // kind.block_bytes, part) for part in kind.stored_block]
        if (fill := native_decoder(kind.name, is_mapped=True)) is not None:
            fill(content.view(-1, kind.block_bytes), parts)
        else:
            self._decode(name, content, parts, kind.fill_stored)
        return tuple(part.view(*shape[:-1], -1) for part in parts)

    def _content(self, name: str, rows: slice | None) -> tuple[Tensor, tuple[int, ...]]:
        """The bytes of a tensor, or of some of its rows, as they are mapped, and its shape."""
        if self._is_closed:
            raise ValueError(f"{self.path} is closed")
        record = self.tensors[name]
        start, size, shape = record.start, record.size, record.shape
        if rows is not None:
            row = size // shape[0]
            start, shape = start + rows.start * row, (rows.stop - rows.start, *shape[1:])
            size = shape[0] * row
        # NumPy keeps a map open that is in use; torch.frombuffer does not.
        return torch.from_numpy(np.frombuffer(record.file, np.uint8, size, start)), shape

    def _blocks(self, count: int, block: Tensor) -> Tensor:
        """Memory for `count` blocks like `block` (1, n), for which NumPy asks the system for large pages."""
        return torch.from_numpy(np.empty((count, block.nbytes), dtype=np.uint8)).view(block.dtype)

    def _decode(self, name: str, content: Tensor, parts: Sequence[Tensor], fill: Fill) -> None:
        """Fills the parts of all blocks (B, n), a piece at a time, which needs little memory besides."""
        kind, file = self.tensors[name].kind, self.tensors[name].file
        blocks = content.view(-1, kind.block_bytes)
        size = max(1, _PIECE // kind.block)
        end = content.data_ptr() - np.frombuffer(file, np.uint8).ctypes.data
        released = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        for begin in range(0, len(blocks), size):
            fill(blocks[begin : begin + size], [part[begin : begin + size] for part in parts])
            # Pages of the file that were decoded need not stay in the memory of this process.
            end += blocks[begin : begin + size].numel()
            count = end // mmap.PAGESIZE * mmap.PAGESIZE - released
            # Each time, the system interrupts all threads of the process.
            if count >= _RELEASED or (count > 0 and begin + size >= len(blocks)):
                file.madvise(mmap.MADV_DONTNEED, released, count)
                released += count

    def digest(self, key: str) -> str:
        """Returns the SHA-256 of the file with zeros in place of the last 64 bytes of the text value of `key`."""
        end = self._ends[key]
        sha = hashlib.sha256()
        with memoryview(self._map) as content:
            for start, stop in ((0, end - _DIGEST_SIZE), (end, len(content))):
                for begin in range(start, stop, _CHUNK):
                    sha.update(content[begin : min(begin + _CHUNK, stop)])
                if stop == end - _DIGEST_SIZE:
                    sha.update(b"0" * _DIGEST_SIZE)
        return sha.hexdigest()

    def _alignment(self, cursor: Cursor) -> int:
        value = self.metadata.get(_ALIGNMENT_KEY)
        if value is None:
            return _ALIGNMENT
        alignment = value.content
        if value.type is not ValueType.U32 or not isinstance(alignment, int):
            raise cursor.problem(f"{_ALIGNMENT_KEY} is not an integer of 4 bytes")
        if not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.problem(f"{_ALIGNMENT_KEY} = {alignment} is not a power of two up to {_LARGEST_ALIGNMENT}")
        return alignment


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Tensors are writable in PyTorch, so what is written to one stays in this process.
            return mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except ValueError:
        raise CheckpointError(f"{path} is not a GGUF file: it is empty.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _read_head(cursor: Cursor) -> tuple[int, int]:
    """Reads magic number and version; returns the counts of tensors and of metadata."""
    magic = cursor.take(len(_MAGIC), "the magic number")
    if magic != _MAGIC:
        raise cursor.problem(f"the file begins with {magic!r} instead of {_MAGIC!r}")
    version = cursor.u32("the version")
    if version and version % 2**16 == 0:
        raise cursor.unread("has big-endian numbers, which SheepOp does not read", "Convert the model again")
    if version not in (2, _VERSION):
        raise cursor.unread(f"has GGUF version {version}; SheepOp reads 2 and 3", "Convert the model again")
    num_tensors, num_values = cursor.u64("the number of tensors"), cursor.u64("the number of metadata values")
    for count, most, smallest, what in (
        (num_values, _MOST_VALUES, _SMALLEST_ENTRY, "metadata values"),
        (num_tensors, _MOST_TENSORS, _SMALLEST_TENSOR, "tensors"),
    ):
        if count > most:
            raise cursor.problem(f"the file claims {count:,} {what}; SheepOp reads at most {most:,}")
        if count * smallest > cursor.left:
            raise cursor.problem(f"the file claims {count:,} {what}, but only {cursor.left:,} bytes are left")
    return num_tensors, num_values


def _read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], dict[str, int]]:
    """Returns the values, and the end position of each."""
    metadata: dict[str, Value] = {}
    ends: dict[str, int] = {}
    for index in range(count):
        key = read_text(cursor, f"key {index}", _LONGEST_KEY)
        if key in metadata:
            raise cursor.problem(f"the key {key!r:.80} occurs twice")
        metadata[key] = read_value(cursor, f"{key!r:.80}")
        ends[key] = cursor.position
    return metadata, ends


def _read_records(cursor: Cursor, count: int, alignment: int, file: mmap.mmap) -> list[TensorRecord]:
    found = [_read_record(cursor) for _ in range(count)]
    if len({name for name, *_ in found}) < len(found):
        twice, _ = Counter(name for name, *_ in found).most_common(1)[0]
        raise cursor.problem(f"the tensor {twice!r} occurs twice")
    unread = {name: type_name(number) for name, number, *_ in found if number not in BY_NUMBER}
    if unread:
        name, kind = next(iter(unread.items()))
        raise CheckpointError(
            f"{len(unread)} of {count} tensors have types that SheepOp does not read: "
            f"{', '.join(sorted(set(unread.values())))} ({name!r} is {kind}). It reads {', '.join(TYPES)}."
        )
    first = -(-cursor.position // alignment) * alignment
    records = [_placed(cursor, entry, first, alignment, file) for entry in found]
    placed = sorted(records, key=lambda record: record.start)
    for before, behind in pairwise(placed):
        if before.start + before.size > behind.start:
            raise cursor.problem(f"the tensors {before.name!r} and {behind.name!r} overlap")
    return records


def _read_record(cursor: Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Returns the name, the type number, the shape, and the offset of the bytes after the records."""
    name = read_text(cursor, "the name of a tensor", _LONGEST_NAME)
    dimensions = cursor.u32(f"the number of dimensions of {name!r}")
    if dimensions > _MOST_DIMENSIONS:
        raise cursor.problem(f"the tensor {name!r} claims {dimensions:,} dimensions; there are at most 4")
    innermost_first = [cursor.u64(f"a size of {name!r}") for _ in range(dimensions)]
    number = cursor.u32(f"the type of {name!r}")
    return name, number, tuple(reversed(innermost_first)), cursor.u64(f"the place of {name!r}")


def _placed(
    cursor: Cursor, entry: tuple[str, int, tuple[int, ...], int], first: int, alignment: int, file: mmap.mmap
) -> TensorRecord:
    name, number, shape, offset = entry
    kind = BY_NUMBER[number]
    if 0 in shape:
        raise cursor.problem(f"the tensor {name!r} of shape {shape} is empty")
    size = kind.size(shape)  # Python's integers do not overflow.
    if size is None:
        raise cursor.problem(f"the tensor {name!r} of shape {shape} cannot have the type {kind.name}")
    if offset % alignment:
        raise cursor.problem(f"the tensor {name!r} begins at {offset:,}, which is not a multiple of {alignment}")
    end = cursor.position + cursor.left
    if first + offset + size > end:
        raise cursor.problem(
            f"the tensor {name!r} of shape {shape} would end at byte {first + offset + size:,} of {end:,}"
        )
    return TensorRecord(name, kind, shape, first + offset, size, file)


def checksum_placeholder(file_type: int) -> Value:
    """Returns the value that a file has until its checksum is known."""
    return value_of(f"file type {file_type}, SHA-256 {'0' * _DIGEST_SIZE}")


def verify_checksum(container: Container) -> None:
    """Raises `CheckpointError` if a file of SheepOp has changed; skips files that were converted to another type."""
    value = container.metadata.get(CHECKSUM_KEY)
    if value is None:
        return
    match = _CHECKSUM.fullmatch(value.content) if isinstance(value.content, str) else None
    if match is None:
        raise CheckpointError(f"{container.path} is damaged: its checksum is malformed. Export the model again.")
    file_type = container.metadata.get(FILE_TYPE_KEY)
    if file_type is not None and file_type.content != int(match[1]):
        return
    if container.digest(CHECKSUM_KEY) != match[2]:
        raise CheckpointError(
            f"{container.path} is damaged, or another program changed it since SheepOp wrote it: its checksum "
            f"differs. Export the model again, or remove the key {CHECKSUM_KEY} from its metadata if the change was "
            "intended."
        )


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written: its name, its type, and its shape in torch's order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes in the file, without padding."""
        size = self.kind.size(self.shape)
        assert size is not None
        return size


def write_container(
    path: Path,
    metadata: Mapping[str, Value],
    entries: Sequence[TensorEntry],
    content_of: Callable[[TensorEntry], Iterable[Tensor]],
) -> None:
    """Writes a file; `content_of` yields the bytes (uint8) of each tensor in pieces.

    The last key must be the checksum's, which is filled in at the end. The caller makes the file durable.
    """
    head = _head(metadata, entries)
    checksum_end = len(_metadata_bytes(metadata, 0))
    with path.open("wb") as file:
        digest = hashlib.sha256()
        _put(file, digest, head)
        for entry in entries:
            written = 0
            for piece in content_of(entry):
                content = piece.contiguous().numpy().tobytes()
                _put(file, digest, content)
                written += len(content)
            assert written == entry.size, entry.name
            _put(file, digest, bytes(-written % _ALIGNMENT))
        file.seek(checksum_end - _DIGEST_SIZE)
        file.write(digest.hexdigest().encode("ascii"))


def _head(metadata: Mapping[str, Value], entries: Sequence[TensorEntry]) -> bytes:
    parts = [_metadata_bytes(metadata, len(entries))]
    place = 0
    for entry in entries:
        assert len(entry.name.encode("utf-8")) <= _LONGEST_NAME, entry.name
        sizes = tuple(reversed(entry.shape))
        parts.append(encoded_text(entry.name))
        parts.append(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.kind.number, place))
        place += entry.size + -entry.size % _ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % _ALIGNMENT)


def _metadata_bytes(metadata: Mapping[str, Value], num_tensors: int) -> bytes:
    assert list(metadata)[-1] == CHECKSUM_KEY
    counts = struct.pack("<IQQ", _VERSION, num_tensors, len(metadata))
    return _MAGIC + counts + b"".join(encoded_text(key) + value.encoded() for key, value in metadata.items())


def _put(file: BinaryIO, digest: hashlib._Hash, content: bytes) -> None:
    file.write(content)
    digest.update(content)
