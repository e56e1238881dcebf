"""How integers of 8 and 4 bits lie in memory on a CPU: in tiles of rows, which ``integers.cpp`` reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import COUNT, POINTER, address, native_function

GROUP = 32
"""Number of int4 weights that share 16 bytes."""
TILE = 16
"""Number of rows of a tile."""

SOURCE = KERNELS / "integers.cpp"
_NUMBERS_AT_A_TIME = 2**20


def units(values: Tensor) -> Tensor:
    """The bytes (..., N, K) of rows as units of four, (..., N, K / 4)."""
    is_aligned = values.is_contiguous() and values.storage_offset() % 4 == 0
    return (values if is_aligned else values.clone(memory_format=torch.contiguous_format)).view(torch.int32)


def tiles_of(rows: Tensor, *, in_place: bool = False) -> Tensor:
    """Arranges rows (..., N, U) in tiles (..., tiles, U, 16); the last one repeats the last row.

    A tile has the bytes of its rows, so if no row is repeated they can be rearranged `in_place`.
    """
    num_rows, length = rows.shape[-2:]
    if missing := -num_rows % TILE:
        last = rows[..., -1:, :].expand(*rows.shape[:-2], missing, length)
        rows = torch.cat([rows, last], -2)
    elif not in_place:
        rows = rows.clone(memory_format=torch.contiguous_format)
    arrange, is_native = _arrange(), rows.itemsize == torch.int32.itemsize and rows.device.type == "cpu"
    if arrange is not None and is_native:
        arrange(address("rows", rows, rows.dtype, *rows.shape), rows.numel() // (TILE * length), length)
        return rows.view(*rows.shape[:-2], -1, length, TILE)
    for part in torch.split(rows.view(-1, TILE, length), max(1, _NUMBERS_AT_A_TIME // (TILE * length))):
        part.view(-1, length, TILE).copy_(part.transpose(1, 2).clone(memory_format=torch.contiguous_format))
    return rows.view(*rows.shape[:-2], -1, length, TILE)


@cache
def _arrange() -> Any:
    return native_function(SOURCE, "arrange_tiles", [POINTER, COUNT, COUNT])


def rows_of(tiles: Tensor, index: Tensor | slice) -> Tensor:
    """Returns contiguous rows (..., U) at `index` from tiles (..., tiles, U, 16)."""
    if isinstance(index, Tensor):
        return tiles[index // TILE, :, index % TILE]
    first = index.start // TILE
    within = tiles[..., first : -(-index.stop // TILE), :, :].transpose(-2, -1).flatten(-3, -2)
    return within[..., index.start - first * TILE : index.stop - first * TILE, :].contiguous()


def unpacked_int4(codes: Tensor, *, is_signed: bool) -> Tensor:
    """Returns the int4 codes (..., K) of bytes (..., K / 2)."""
    pairs = torch.unflatten(codes, -1, (-1, GROUP // 2))
    if is_signed:
        halves = (pairs << 4).view(torch.int8) >> 4, pairs.view(torch.int8) >> 4
    else:
        halves = pairs & 15, pairs >> 4
    return torch.cat(halves, -1).flatten(-2)
