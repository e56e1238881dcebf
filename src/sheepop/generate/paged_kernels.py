"""Keys and values stored in blocks, and the kernels in which single tokens attend to them without copying.

On a CPU the kernel is compiled from ``native/attention.cpp``; on a GPU it is `triton_kernel`. Shapes: R tokens, M
blocks of a sequence, H query heads, K key-value heads, S tokens of a block, C head_dim.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sheepop.adapt.stored_weight import pointer
from sheepop.core.native import native_library
from sheepop.model.attention.kernel import AttentionKind, Score

_SOURCE = Path(__file__).parent / "native" / "attention.cpp"
_TILE = 64  # positions that a Triton program reads at a time
_PROGRAMS = 512  # enough for any GPU


class KVBlocks:
    """Keys or values of a layer in blocks (blocks, K, S, C): floats, or int8 with a scale for each head of a token."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, in_int8: bool
    ) -> None:
        self.dtype = dtype
        self.numbers = _zeros(shape, torch.int8 if in_int8 else dtype, device)
        self.scales = _zeros(shape[:3], torch.float32, device) if in_int8 else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def store(self, slot_mapping: tuple[Tensor, Tensor], x_NKC: Tensor) -> Tensor:
        """Stores the keys or values of N tokens in their slots; returns them as they will be read, after rounding."""
        blocks, offsets = slot_mapping
        if self.scales is None:
            self.numbers[blocks, :, offsets] = x_NKC.to(self.dtype)  # x_NKC has another dtype under autocast
            return x_NKC
        scales_NK = x_NKC.abs().amax(-1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded_NKC = (x_NKC / scales_NK[..., None]).round().to(torch.int8)
        self.numbers[blocks, :, offsets], self.scales[blocks, :, offsets] = rounded_NKC, scales_NK
        return (rounded_NKC * scales_NK[..., None]).to(self.dtype)

    def gather(self, block_table: Tensor, num_keys: int) -> Tensor:
        """The first `num_keys` entries of the blocks of each row of `block_table` (B, M), as (B, K, num_keys, C)."""
        heads = torch.arange(self.numbers.shape[1], device=self.numbers.device)[:, None]
        found, *scales = (
            stored[block_table[:, None, :], heads].flatten(2, 3)[:, :, :num_keys] for stored in self.tensors
        )
        return (found * scales[0][..., None]).to(self.dtype) if scales else found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies whole blocks."""
        for stored in self.tensors:
            stored[target] = stored[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only where they are used: the system maps pages on the first write."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class AttentionMetadata:
    """Where R tokens of a pass, its `rows` (R,), find and store keys and values.

    `block_table` (R, M) lists the blocks of each token's sequence, `first_positions` and `last_positions` (R,) bound
    the positions that it sees, and `slot_mapping` is the block, and the offset in it, where the token itself is stored.
    """

    rows: Tensor
    block_table: Tensor
    first_positions: Tensor
    last_positions: Tensor
    slot_mapping: tuple[Tensor, Tensor]


def attends_natively(kind: AttentionKind) -> bool:
    """Whether the CPU's kernel is available and supports these layers."""
    is_exact = kind.device.type == "cpu" and kind.dtype == torch.float32 and kind.latents is None
    return is_exact and native_library(_SOURCE) is not None


@cache
def attention_kernel(in_int8: bool) -> Callable[..., None]:
    """The CPU's kernel for keys and values in int8 or float32; ``attention.cpp`` describes its arguments."""
    found = getattr(native_library(_SOURCE), "attend_int8" if in_int8 else "attend_float32")
    pointers, sizes, factors = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 7, [ctypes.c_float] * 2
    found.argtypes = [*pointers, *sizes, *factors, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
    found.restype = None
    return found


def attend_natively(
    q_RHC: Tensor, keys: KVBlocks, values: KVBlocks, metadata: AttentionMetadata, score: Score, slopes: Tensor | None
) -> Tensor:
    """Attends from R tokens to the positions of their sequences that they see, on a CPU; (R, H, C)."""
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    out = q_RHC.new_empty(rows, heads, value_width)
    sinks = None if score.sinks is None else score.sinks.float().contiguous()
    stored = keys.numbers, values.numbers, keys.scales, values.scales
    table = metadata.block_table
    attention_kernel(keys.scales is not None)(
        *map(pointer, (q_RHC, *stored, table, metadata.first_positions, metadata.last_positions, out)),
        *(rows, heads, kv_heads, size, width, value_width, table.shape[1]),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 0.0,
        pointer(slopes),
        pointer(sinks),
        *(0, rows * kv_heads, torch.get_num_threads()),
    )
    return out


def attends_by_triton(kind: AttentionKind) -> bool:
    """Whether these layers are on a GPU, have keys and values in the cache, and Triton is installed."""
    return kind.device.type == "cuda" and kind.latents is None and find_spec("triton") is not None


def attend_by_triton(
    q_RHC: Tensor, keys: KVBlocks, values: KVBlocks, metadata: AttentionMetadata, score: Score, slopes: Tensor | None
) -> Tensor:
    """Attends from R tokens to the positions of their sequences that they see, on a GPU; (R, H, C).

    The positions are split into parts that are read in parallel (Dao et al. 2023, Flash-Decoding), because one program
    per head would leave most of a GPU idle. Each part returns its largest score, its sum and its weighted sum. The
    split depends on shapes alone, so that a pass can be captured in a CUDA graph and replayed.
    """
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    table = metadata.block_table
    longest = table.shape[1] * size
    parts = max(1, min(_PROGRAMS // (rows * kv_heads), longest // (2 * _TILE)))
    tops, sums = (q_RHC.new_empty(rows, heads, parts, dtype=torch.float32) for _ in range(2))
    sums_of_values = q_RHC.new_empty(rows, heads, parts, value_width, dtype=torch.float32)
    scales = [keys.numbers if scales is None else scales for scales in (keys.scales, values.scales)]
    # Triton takes a second to load, and not every machine has it.
    from sheepop.generate.triton_kernel import attend

    attend[(rows, kv_heads, parts)](
        *(q_RHC, keys.numbers, values.numbers, *scales, table, metadata.first_positions, metadata.last_positions),
        q_RHC if slopes is None else slopes,
        *(tops, sums, sums_of_values, kv_heads, table.shape[1], parts),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 1.0,
        GROUP=heads // kv_heads,
        SIZE=size,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        TILE=_TILE,
        **_powers(GROUPS=heads // kv_heads, COLUMNS=width, VALUE_COLUMNS=value_width),
        IN_INT8=keys.scales is not None,
        CAPPED=score.soft_cap is not None,
        SLOPED=slopes is not None,
    )
    top = tops.amax(-1, keepdim=True)
    if score.sinks is not None:  # a sink adds a score to the softmax, but no value
        top = top.maximum(score.sinks.float()[:, None])
    shares = (tops - top).exp()
    total = (sums * shares).sum(-1, keepdim=True)
    if score.sinks is not None:
        total = total + (score.sinks.float()[:, None] - top).exp()
    return ((sums_of_values * shares[..., None]).sum(-2) / total).to(q_RHC.dtype)


def _powers(**sizes: int) -> dict[str, int]:
    """Rounds each size up to a power of two, as Triton's vectors need."""
    return {name: 1 << (size - 1).bit_length() for name, size in sizes.items()}
