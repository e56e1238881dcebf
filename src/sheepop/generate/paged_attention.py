"""Attention of a pass to keys and values that lie in blocks: which tokens attend together, and by which kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sheepop.adapt.stored_weight import pointer
from sheepop.core.native import native_library
from sheepop.generate.blocks import Chunk
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.attention.sight import Sight

# Chunks of more tokens attend sequence by sequence, with the kernels of training; shorter ones all together.
_LONGEST_TOGETHER = 8
_SOURCE = Path(__file__).parent / "native" / "attention.cpp"


class HeldBlocks:
    """Keys or values of a layer in blocks (blocks, K, S, C): floats, or int8 with a scale for each head of a token."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, in_int8: bool
    ) -> None:
        self.dtype = dtype
        self.numbers = torch.zeros(shape, dtype=torch.int8 if in_int8 else dtype, device=device)
        self.scales = torch.zeros(shape[:3], device=device) if in_int8 else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def store(self, blocks: Tensor, slots: Tensor, x_NKC: Tensor) -> Tensor:
        """Puts what belongs to N tokens in their places; what will be read from there."""
        if self.scales is None:
            self.numbers[blocks, :, slots] = x_NKC.to(self.dtype)  # another one under autocast
            return x_NKC
        scales_NK = x_NKC.abs().amax(-1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded_NKC = (x_NKC / scales_NK[..., None]).round().to(torch.int8)
        self.numbers[blocks, :, slots], self.scales[blocks, :, slots] = rounded_NKC, scales_NK
        return (rounded_NKC * scales_NK[..., None]).to(self.dtype)

    def gather(self, blocks: Tensor, num_keys: int) -> Tensor:
        """The first entries of these blocks (B, blocks), one behind the other: (B, K, S, C)."""
        heads = torch.arange(self.numbers.shape[1], device=self.numbers.device)[:, None]
        found, *scales = (held[blocks[:, None, :], heads].flatten(2, 3)[:, :, :num_keys] for held in self.tensors)
        return (found * scales[0][..., None]).to(self.dtype) if scales else found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies whole blocks."""
        for held in self.tensors:
            held[target] = held[source]


class Pass:
    """The tokens of a pass: position, sequence and first new position of each (N,), and the tables.

    All indices are made on the host, so that the device is never asked for one.
    """

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> None:
        self.chunks, self.device, self.block_size = chunks, device, block_size
        counts = torch.tensor([chunk.count for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        self.sequences = torch.arange(len(chunks)).repeat_interleave(counts)
        self.starts = starts[self.sequences]
        self.positions = self.starts + torch.arange(len(self.sequences)) - (counts.cumsum(0) - counts)[self.sequences]
        self.device_positions = self.positions.to(device)
        self._ends: list[int] = counts.cumsum(0).tolist()
        self._tables: dict[int, Tensor] = {}

    def table(self, kind: int) -> Tensor:
        """The blocks of every sequence (R, blocks); any number stands where there is none."""
        if kind not in self._tables:
            lists = [[block or 0 for block in chunk.table.blocks[kind]] for chunk in self.chunks]
            longest = max(map(len, lists))
            self._tables[kind] = torch.tensor([blocks + [0] * (longest - len(blocks)) for blocks in lists])
        return self._tables[kind]

    def blocks(self, kind: int, sequences: Tensor, positions: Tensor) -> Tensor:
        """The blocks that hold these positions of these sequences."""
        return self.table(kind)[sequences, positions // self.block_size]

    def rows(self, sequences: Sequence[int]) -> Tensor:
        """The rows of the pass with tokens of these sequences, in their order."""
        return torch.cat([torch.arange(self._ends[n] - self.chunks[n].count, self._ends[n]) for n in sequences])

    def last_of_blocks(self, count: int) -> Tensor:
        """The tokens that are among the last `count` of the pass in their block and sequence."""
        ends = torch.tensor([chunk.end for chunk in self.chunks])[self.sequences]
        block_ends = (self.positions // self.block_size + 1) * self.block_size
        return (self.positions + count >= ends.minimum(block_ends)).nonzero()[:, 0]


@dataclass(frozen=True)
class _Group:
    """Tokens of a pass that attend together: `rows` of the pass, as `shape` (rows, tokens), to the keys of `blocks`.

    `blocks` (rows, blocks) are None where the keys are those of the pass itself; `num_keys` of them are seen.
    """

    rows: Tensor
    shape: tuple[int, int]
    attending: Attending
    num_keys: int
    blocks: Tensor | None


@dataclass(frozen=True)
class Places:
    """Tokens of a pass, those of `rows`, whose keys are read where they lie.

    The blocks of the text of each (R, M), the first and last place that it sees, and where it is stored itself.
    """

    rows: Tensor
    table: Tensor
    firsts: Tensor
    lasts: Tensor
    blocks: Tensor
    slots: Tensor


class PagedAttending:
    """What the layers of a kind share in a pass.

    Texts that begin in it are the documents of one packed row, as in training; a long chunk of any other text has a
    kernel of its own; all short ones attend together. With `apart` every token is a short one, so that what becomes of
    it does not depend on what else is read.
    """

    def __init__(self, kind: AttentionKind, now: Pass, number: int, *, native: bool, apart: bool) -> None:
        self._kind, self._now, self._number = kind, now, number
        self._reads_blocks = native and _reads_blocks(kind)
        blocks = now.blocks(number, now.sequences, now.positions)
        self.targets = blocks.to(now.device), (now.positions % now.block_size).to(now.device)
        self._groups: list[_Group] = []
        self._native: Places | None = None
        sequences = range(len(now.chunks))
        long = [number for number in sequences if now.chunks[number].count > _LONGEST_TOGETHER and not apart]
        self._add_beginnings([number for number in long if now.chunks[number].start == 0])
        for sequence in long:
            if now.chunks[sequence].start > 0:
                self._add_chunk(sequence)
        self._add_short([number for number in sequences if number not in long])

    def _add_beginnings(self, sequences: list[int]) -> None:
        """Whole rows of keys are in the pass itself."""
        if not sequences:
            return
        rows = self._now.rows(sequences)
        documents = None if len(sequences) == 1 else self._now.sequences[rows][None].to(self._now.device)
        self._add(rows, (1, len(rows)), self._kind.sight(len(rows), document_ids=documents), None)

    def _add_chunk(self, sequence: int) -> None:
        chunk, size = self._now.chunks[sequence], self._now.block_size
        first = _first_block(chunk.start, self._kind.window, size)
        blocks = self._now.table(self._number)[sequence : sequence + 1, first : -(-chunk.end // size)]
        sight = self._kind.sight(chunk.count, chunk.end - first * size)
        self._add(self._now.rows([sequence]), (1, chunk.count), sight, blocks)

    def _add_short(self, sequences: list[int]) -> None:
        """Each token is a row of its own, beside others whose keys begin and end elsewhere."""
        if not sequences:
            return
        rows, table, size = self._now.rows(sequences), self._now.table(self._number), self._now.block_size
        places = self._now.positions[rows]
        if self._reads_blocks:
            window = self._kind.window
            firsts = torch.zeros_like(places) if window is None else (places - window + 1).clamp(min=0)
            blocks, slots = (target[rows] for target in self.targets)
            table = table[self._now.sequences[rows]].contiguous()
            self._native = Places(rows, table, firsts, places, blocks, slots)
            return
        firsts = torch.tensor([_first_block(place, self._kind.window, size) for place in places.tolist()])
        starts = places - firsts * size
        num_keys = int(starts.max()) + 1
        columns = (firsts[:, None] + torch.arange(-(-num_keys // size))).clamp(max=table.shape[1] - 1)
        sight = self._kind.sight(1, num_keys, starts=starts.to(self._now.device))
        self._add(rows, (len(rows), 1), sight, table[self._now.sequences[rows][:, None], columns])

    def _add(self, rows: Tensor, shape: tuple[int, int], sight: Sight, blocks: Tensor | None) -> None:
        device = self._now.device
        blocks = None if blocks is None else blocks.to(device)
        attending = prepare_attention(self._kind, sight)
        self._groups.append(_Group(rows.to(device), shape, attending, sight.num_keys, blocks))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where the new tokens are stored: their blocks and places (N,)."""
        return self.targets

    @property
    def places(self) -> Places | None:
        """Those of all tokens of the pass, where the keys of all are read where they lie."""
        return None if self._groups else self._native

    def over(
        self, keys: HeldBlocks, values: HeldBlocks, q_NH1C: Tensor, k_NK1C: Tensor, v_NK1C: Tensor, score: Score
    ) -> Tensor:
        """Attends to the blocks of a layer, which already hold the new `k_NK1C` and `v_NK1C`; (N, H, 1, C)."""
        out_NH1C = q_NH1C.new_empty(*q_NH1C.shape[:3], v_NK1C.shape[-1])
        if self._native is not None:
            rows, alone = self._native.rows, self.places is not None
            q_RHC = (q_NH1C if alone else q_NH1C[rows])[:, :, 0].contiguous()
            out_RHC = _attend_to_blocks(q_RHC, keys, values, self._native, score, self._kind.slopes)
            if alone:
                return out_RHC[:, :, None]
            out_NH1C[rows, :, 0] = out_RHC
        for group in self._groups:
            shape = group.shape
            q_BHTC, k_BKSC, v_BKSC = (_as_rows(x[group.rows], *shape) for x in (q_NH1C, k_NK1C, v_NK1C))
            if group.blocks is not None:
                k_BKSC, v_BKSC = (held.gather(group.blocks, group.num_keys) for held in (keys, values))
            out_BHTC = group.attending.attend(q_BHTC, k_BKSC, v_BKSC, score)
            out_NH1C[group.rows] = out_BHTC.transpose(1, 2).flatten(0, 1)[:, :, None]
        return out_NH1C

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Not without the blocks; `over` is given them."""
        raise ValueError("paged attention reads its keys from blocks; ask the cache to attend")


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The first block that a query at this position sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _as_rows(x_NH1C: Tensor, rows: int, tokens: int) -> Tensor:
    """Tokens (B * T, H, 1, C) as (B, H, T, C)."""
    return x_NH1C.view(rows, tokens, x_NH1C.shape[1], x_NH1C.shape[3]).transpose(1, 2)


def _reads_blocks(kind: AttentionKind) -> bool:
    """Whether the kernel that reads keys where they lie can attend so."""
    suits = kind.device.type == "cpu" and kind.dtype == torch.float32 and not kind.watched and kind.dropout == 0
    return suits and native_library(_SOURCE) is not None


@cache
def attention_kernel(in_int8: bool) -> Callable[..., None]:
    """The kernel that reads keys and values of this kind where they lie; see ``attention.cpp`` for what it takes."""
    found = getattr(native_library(_SOURCE), "attend_int8" if in_int8 else "attend_float32")
    places, sizes, factors = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 7, [ctypes.c_float] * 2
    found.argtypes, found.restype = [*places, *sizes, *factors, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return found


def _attend_to_blocks(
    q_RHC: Tensor, keys: HeldBlocks, values: HeldBlocks, native: Places, score: Score, slopes: Tensor | None
) -> Tensor:
    """Attends from R tokens to the places of their texts that they see; (R, H, C)."""
    rows, heads, width = q_RHC.shape
    _, kv_heads, size, value_width = values.numbers.shape
    out = q_RHC.new_empty(rows, heads, value_width)
    sinks = None if score.sinks is None else score.sinks.float().contiguous()
    held = keys.numbers, values.numbers, keys.scales, values.scales
    attention_kernel(keys.scales is not None)(
        *map(pointer, (q_RHC, *held, native.table, native.firsts, native.lasts, out)),
        *(rows, heads, kv_heads, size, width, value_width, native.table.shape[1]),
        width**-0.5 if score.scale is None else score.scale,
        score.soft_cap or 0.0,
        pointer(slopes),
        pointer(sinks),
        torch.get_num_threads(),
    )
    return out
