"""Keys and values stored in blocks, and the kernels in which single tokens attend to them without copying.

On a CPU the kernel is compiled from ``attention.cpp``; on a GPU it is in `triton_attention`. Shapes: R tokens,
M blocks of a sequence, H query heads, K key-value heads, S tokens of a block, C head_dim.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import COUNT, POINTER, address, name_of, native_function, native_library
from sheepop.model.attention.kernel import AttentionKind, Score
from sheepop.model.fused import fuses, power_of_two

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The data types of 8 bits that a cache may have, with their largest numbers."""

_SOURCE = KERNELS / "attention.cpp"
_PROGRAMS = 512  # enough for any GPU
_LEAST_MEMBERS = 16  # rows of the smallest product of matrices in Triton


class Stored(ctypes.Structure):
    """Describes the keys or values of a layer to native code."""

    _fields_ = [("numbers", POINTER), ("scales", POINTER)]


class Attention(ctypes.Structure):
    """Describes the inputs and the output of attention in a layer to native code; see ``attention.h``."""

    _fields_ = [
        ("queries", POINTER),
        *((name, Stored) for name in ("keys", "values")),
        *((name, POINTER) for name in ("table", "tiles", "out")),
        *((name, COUNT) for name in ("R", "H", "K", "S", "C", "D", "M", "window")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, POINTER) for name in ("slopes", "sinks")),
    ]


class KVBlocks:
    """Keys or values of a layer in blocks (blocks, K, S, C), which are stored in `stored` and read in `dtype`.

    In 8 bits each head of a token has a scale, with which its largest number becomes the largest of `stored`.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, stored: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.numbers = zeros(shape, stored, device)
        self.scales = zeros(shape[:3], torch.float32, device) if stored in LARGEST else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in which the blocks are stored: the numbers and, in 8 bits, the scales."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def described(self, *shape: int) -> Stored:
        """Describes the numbers, which must have this shape, and the scales to a native kernel."""
        numbers = address("the cache", self.numbers, self.numbers.dtype, *shape)
        return Stored(numbers, address("the cache's scales", self.scales, torch.float32, *shape[:3]))

    def store(self, slot_mapping: tuple[Tensor, Tensor], x_NKC: Tensor) -> Tensor:
        """Stores the keys or values of N tokens in their slots, and returns them with the rounding of the cache."""
        if fuses(x_NKC.device.type):
            return self.store_by_triton(slot_mapping, x_NKC)
        (blocks, offsets), stored = slot_mapping, self.numbers.dtype
        scales_NK = None
        if self.scales is not None:
            top_NK = x_NKC.abs().amax(-1).float().clamp(min=torch.finfo(torch.float32).tiny)
            self.scales[blocks, :, offsets] = scales_NK = top_NK / LARGEST[stored]
            x_NKC = x_NKC / scales_NK[..., None]
        rounded_NKC = (x_NKC if stored.is_floating_point else x_NKC.round()).to(stored)
        self.numbers[blocks, :, offsets] = rounded_NKC
        return self._read(rounded_NKC, scales_NK)

    def _read(self, numbers: Tensor, scales: Tensor | None) -> Tensor:
        """Converts stored numbers (..., C) back to keys or values, with their scales."""
        return numbers.to(self.dtype) if scales is None else (numbers.float() * scales[..., None]).to(self.dtype)

    def store_by_triton(self, slot_mapping: tuple[Tensor, Tensor], x_NKC: Tensor) -> Tensor:
        """Does the same as `store` in one kernel."""
        # Triton takes a second to load, and not every machine has it.
        from sheepop.generate.triton_attention import store

        _, heads, size, width = self.numbers.shape
        x_NKC = x_NKC if x_NKC.stride(-1) == 1 else x_NKC.contiguous()
        read_NKC = x_NKC if self.scales is None else torch.empty_like(x_NKC, memory_format=torch.contiguous_format)
        scales = self.numbers if self.scales is None else self.scales
        store[(len(x_NKC),)](
            *(x_NKC, *slot_mapping, self.numbers, scales, read_NKC, x_NKC.stride(0), x_NKC.stride(1), heads),
            SCALED=self.scales is not None,
            LARGEST=LARGEST.get(self.numbers.dtype, 0.0),
            SIZE=size,
            WIDTH=width,
            HEADS=power_of_two(heads),
            COLUMNS=power_of_two(width),
        )
        return read_NKC

    def gather(self, block_table: Tensor, num_keys: int, beyond: Tensor | None = None) -> Tensor:
        """Returns the first `num_keys` entries in the blocks of each row of `block_table` (B, M): (B, K, num_keys, C).

        Those `beyond` the end of a row (B, num_keys) become 0: NaN in them would pass any mask of attention.
        """
        heads = torch.arange(self.numbers.shape[1], device=self.numbers.device)[:, None]
        numbers, scales = (
            stored if stored is None else stored[block_table[:, None, :], heads].flatten(2, 3)[:, :, :num_keys]
            for stored in (self.numbers, self.scales)
        )
        assert numbers is not None
        found = self._read(numbers, scales)
        return found if beyond is None else found.masked_fill_(beyond[:, None, :, None], 0)

    def grow(self, count: int) -> None:
        """Adds blocks of zeros until there are `count`."""
        self.numbers = grown(self.numbers, count)
        self.scales = None if self.scales is None else grown(self.scales, count)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies whole blocks."""
        for stored in self.tensors:
            stored[target] = stored[source]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros, which on a CPU take memory only where they are used: the system maps pages on the first write.

    They have a mapping of their own, because an allocator that keeps freed memory would write zeros there.
    """
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def grown(blocks: Tensor, count: int) -> Tensor:
    """Returns a copy of `blocks` with blocks of zeros appended, `count` blocks in all."""
    found = zeros((count, *blocks.shape[1:]), blocks.dtype, blocks.device)
    found[: len(blocks)] = blocks
    return found


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the R tokens in the `rows` (R,) of a pass read and store keys and values.

    `block_table` (R, M) lists the blocks of each token's sequence, `last_positions` (R,) are the last positions that
    they see, and `slot_mapping` is the block, and the offset in it, where the token itself is stored. `window` is how
    many positions a token sees, itself included; None is all.

    If there are `tiles` (tiles, 4), as always on a CPU, the tokens of a sequence attend together in pieces of up to
    `tokens_per_tile`: each tile has its first row among `rows`, its number of tokens, the position of the first, and
    its row of `block_table`, which has one row for each sequence. `described` has what native blocks were told of them.
    """

    rows: Tensor
    block_table: Tensor
    last_positions: Tensor
    slot_mapping: tuple[Tensor, Tensor]
    window: int | None = None
    tiles: Tensor | None = None
    described: list[Any] = field(default_factory=list)

    def addresses(self) -> list[int | None]:
        """Returns the addresses of the block table and the tiles for a native kernel."""
        assert self.tiles is not None
        found = ("the block table", self.block_table), ("the tiles", self.tiles)
        return [address(name, x, torch.int64, *x.shape) for name, x in found]


def attends_natively(kind: AttentionKind) -> bool:
    """Whether the CPU's kernel is available and supports these layers."""
    is_exact = kind.device.type == "cpu" and kind.dtype == torch.float32 and kind.latents is None
    return is_exact and native_library(_SOURCE) is not None


@cache
def attention_kernel(stored: torch.dtype) -> Any:
    """Returns the CPU's kernel for keys and values stored in this data type; see ``attention.h`` for its arguments."""
    return native_function(_SOURCE, f"attend_{name_of(stored)}", [POINTER, COUNT, COUNT, COUNT])


@cache
def storing_kernel(stored: torch.dtype) -> Any:
    """Returns the CPU's function that stores a key or value in this data type; see ``attention.h``."""
    return native_function(_SOURCE, f"write_{name_of(stored)}", [POINTER, POINTER, COUNT, POINTER, COUNT])


def attend_natively(
    q_RHC: Tensor, keys: KVBlocks, values: KVBlocks, metadata: AttentionMetadata, score: Score, slopes: Tensor | None
) -> Tensor:
    """Computes the attention (R, H, C) of R tokens to the positions of their sequences that they see, on a CPU.

    A token's result does not depend on the other tokens, nor on the tiles.
    """
    rows, heads, width = q_RHC.shape
    blocks, kv_heads, size, value_width = values.numbers.shape
    assert metadata.tiles is not None
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    out = q_RHC.new_empty(rows, heads, value_width)
    sinks = None if score.sinks is None else score.sinks.float().contiguous()
    attention = Attention(
        address("queries", q_RHC, torch.float32, rows, heads, width),
        *(x.described(blocks, kv_heads, size, w) for x, w in ((keys, width), (values, value_width))),
        *metadata.addresses(),
        address("out", out, torch.float32, rows, heads, value_width),
        *(len(metadata.tiles), heads, kv_heads, size, width, value_width, metadata.block_table.shape[1]),
        metadata.window or 0,
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 0.0,
        *(address(name, part, torch.float32, heads) for name, part in (("slopes", slopes), ("sinks", sinks))),
    )
    items = len(metadata.tiles) * kv_heads
    attention_kernel(keys.numbers.dtype)(ctypes.byref(attention), 0, items, torch.get_num_threads())
    return out


def attends_by_triton(kind: AttentionKind) -> bool:
    """Whether Triton is installed and its kernel supports these layers: on a GPU, with keys and values in the cache."""
    return kind.latents is None and fuses(kind.device.type)


def tokens_per_tile(dtype: torch.dtype) -> int:
    """Returns the most tokens in a tile: few in float32, since Triton compiles larger products of it for a minute.

    On a CPU few of them let all threads share the work, and are enough to read each key once for many products.
    """
    return _LEAST_MEMBERS if dtype == torch.float32 else 64


def _tile(queries: torch.dtype, in_8_bits: bool, many_tokens: bool) -> tuple[int, int]:
    """Returns the positions that a program reads at a time and its pipeline stages, the fastest on an H100."""
    if queries == torch.float32:  # larger tiles take Triton a minute to compile
        return 32, 3
    if in_8_bits:
        return 128, 2 if many_tokens else 3
    return 64 if many_tokens else 32, 3


def attend_by_triton(
    q_RHC: Tensor, keys: KVBlocks, values: KVBlocks, metadata: AttentionMetadata, score: Score, slopes: Tensor | None
) -> Tensor:
    """Computes the attention (R, H, C) of R tokens to the positions of their sequences that they see, on a GPU.

    Tokens that attend alone share the positions among programs that run in parallel (Dao et al. 2023, Flash-Decoding),
    because one program per head would leave most of a GPU idle. The split depends on shapes alone, so that a pass can
    be captured in a CUDA graph and replayed.
    """
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    table, tiles = metadata.block_table, metadata.tiles
    group = heads // kv_heads
    grid, tokens, together, parts = (rows, kv_heads), max(1, _LEAST_MEMBERS // power_of_two(group)), group, 1
    tile, stages = _tile(q_RHC.dtype, keys.scales is not None, tiles is not None)
    if tiles is None:
        parts = max(1, min(_PROGRAMS // (rows * kv_heads), table.shape[1] * size // max(64, tile)))
    else:
        grid, tokens, together = (len(tiles), heads), tokens_per_tile(q_RHC.dtype), 1
    out = q_RHC.new_empty(rows, heads, value_width)
    partial: list[Tensor] = [out, out, out]
    if parts > 1:
        shape = (rows, heads, parts)
        partial = [q_RHC.new_empty(part, dtype=torch.float32) for part in (shape, shape, (*shape, value_width))]
    scales = [keys.numbers if scales is None else scales for scales in (keys.scales, values.scales)]
    sinks = out if score.sinks is None else score.sinks
    # Triton takes a second to load, and not every machine has it.
    from sheepop.generate.triton_attention import attend, combine

    attend[(*grid, parts)](
        *(q_RHC, keys.numbers, values.numbers, *scales, table, metadata.last_positions),
        *(table if tiles is None else tiles, out if slopes is None else slopes, sinks),
        *(out, *partial, heads, kv_heads, table.shape[1], parts, metadata.window or 0),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 1.0,
        TOKENS=tokens,
        HEADS=together,
        GROUP=group,
        SIZE=size,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        TILE=tile,
        GROUPS=power_of_two(together),
        COLUMNS=max(16, power_of_two(width)),
        VALUE_COLUMNS=max(16, power_of_two(value_width)),
        TILED=tiles is not None,
        SPLIT=parts > 1,
        WINDOWED=metadata.window is not None,
        SCALED=keys.scales is not None,
        CAPPED=score.soft_cap is not None,
        SLOPED=slopes is not None,
        SUNK=score.sinks is not None,
        num_stages=stages,
    )
    if parts > 1:
        combine[(rows * heads,)](
            *(*partial, sinks, out, heads, parts),
            VALUE_WIDTH=value_width,
            PARTS=power_of_two(parts),
            VALUE_COLUMNS=power_of_two(value_width),
            SUNK=score.sinks is not None,
        )
    return out
