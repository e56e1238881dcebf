"""Attention of a forward pass over blocks of keys and values: which tokens attend together, and in which kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.generate.blocks import BlockTable, Chunk
from sheepop.generate.paged_kernels import (
    AttentionMetadata,
    KVBlocks,
    attend_by_triton,
    attend_natively,
    attends_by_triton,
    attends_natively,
    tokens_per_tile,
)
from sheepop.generate.transfers import upload
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.attention.sight import Sight
from sheepop.model.cache import AttendLatents

# Without a kernel for blocks, longer chunks attend one sequence at a time, with the kernels of training; shorter ones
# all attend together.
_LONGEST_TOGETHER = 8


class Pass:
    """The tokens of a forward pass: position, sequence and first new position of each (N,), and the block tables.

    All indices are computed on the host, so that nothing waits for the device.
    """

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> None:
        self.chunks, self.device, self.block_size = chunks, device, block_size
        counts = torch.tensor([chunk.count for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        self.sequences = torch.arange(len(chunks)).repeat_interleave(counts)
        self.starts = starts[self.sequences]
        self.positions = self.starts + torch.arange(len(self.sequences)) - (counts.cumsum(0) - counts)[self.sequences]
        self.device_positions = upload(self.positions, device)
        self._ends: list[int] = counts.cumsum(0).tolist()
        self._block_tables: dict[int, Tensor] = {}

    def block_table(self, kind: int, absent: int = 0) -> Tensor:
        """The blocks of every sequence (R, blocks); `absent` where there is none, the same in all calls for a kind."""
        if kind not in self._block_tables:
            lists = [
                [absent if block is None else block for block in chunk.table.blocks[kind]] for chunk in self.chunks
            ]
            longest = max(map(len, lists))
            self._block_tables[kind] = torch.tensor([blocks + [0] * (longest - len(blocks)) for blocks in lists])
        return self._block_tables[kind]

    def blocks(self, kind: int, sequences: Tensor, positions: Tensor, absent: int = 0) -> Tensor:
        """The blocks that hold these positions of these sequences; see `block_table`."""
        return self.block_table(kind, absent)[sequences, positions // self.block_size]

    def rows(self, sequences: Sequence[int]) -> Tensor:
        """The rows of the pass with tokens of these sequences, in their order."""
        return torch.cat([torch.arange(self._ends[n] - self.chunks[n].count, self._ends[n]) for n in sequences])

    def last_of_blocks(self, count: int) -> Tensor:
        """The rows that are among the last `count` tokens of the pass in their block and sequence."""
        ends = torch.tensor([chunk.end for chunk in self.chunks])[self.sequences]
        block_ends = (self.positions // self.block_size + 1) * self.block_size
        return (self.positions + count >= ends.minimum(block_ends)).nonzero()[:, 0]


class StaticPass:
    """The static buffers that passes of `count` single tokens read, in a CUDA graph or in native code.

    `fill` writes the tokens of a pass there. No sequence is longer than `longest` tokens. `spare_blocks[kind]` is a
    block that belongs to no sequence. All numbers reach a GPU in one copy, which does not wait; it holds only the rows
    of the block tables that have changed. On a CPU the buffers are those that `fill` writes.

    The attention of each kind of layers is prepared once, in `attending`. `described` is for those who describe the
    buffers to native code, which they need to do only once.
    """

    def __init__(
        self,
        count: int,
        longest: int,
        block_size: int,
        windows: Sequence[int | None],
        spare_blocks: Sequence[int],
        device: torch.device,
    ) -> None:
        self.count, self.longest = count, longest
        self._block_size, self._spare_blocks = block_size, spare_blocks
        width = -(-longest // block_size)
        # Token ids and positions, which are also the last ones that tokens see; for each kind the blocks and offsets of
        # the slots.
        self._numbers = np.zeros((2 + 2 * len(windows), count), np.int64)
        self._tiles = np.arange(count)[:, None].repeat(4, 1)
        self._tiles[:, 1] = 1
        self._tables = [np.full((count, width), spare, np.int64) for spare in spare_blocks]
        self._on_device = torch.from_numpy(self._numbers).to(device)
        self.input_ids, self.device_positions = self._on_device[0][:, None], self._on_device[1]
        rows = torch.arange(count, device=device)
        tiles = torch.from_numpy(self._tiles) if device.type == "cpu" else None
        self.metadata = []
        for kind, (window, numbers) in enumerate(zip(windows, self._tables, strict=True)):
            table = torch.from_numpy(numbers).to(device)
            blocks, offsets = self._on_device[2 + 2 * kind : 4 + 2 * kind]
            self.metadata.append(
                AttentionMetadata(rows, table, self.device_positions, (blocks, offsets), window, tiles)
            )
        self.attending: dict[int, PagedAttending] = {}
        self.described: dict[Any, Any] = {}
        # The block tables that the rows have now, with their versions; None is padding.
        self._states: list[tuple[BlockTable, int] | None] = [None] * count

    def fill(self, token_ids: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """Writes single tokens of `count` or fewer sequences; padding tokens are at the beginning of a spare block."""
        used, size = len(chunks), self._block_size
        states = [(chunk.table, chunk.table.version) for chunk in chunks] + [None] * (self.count - used)
        changed = [row for row, pair in enumerate(zip(states, self._states, strict=True)) if pair[0] != pair[1]]
        self._states = states
        self._numbers[:, used:] = 0
        self._numbers[0, :used], self._numbers[1, :used] = token_ids, [chunk.start for chunk in chunks]
        positions = self._tiles[:, 2] = self._numbers[1]
        moved = [np.array(changed, np.int64)]
        for kind, (table, spare) in enumerate(zip(self._tables, self._spare_blocks, strict=True)):
            longest = 0
            for row in changed:
                found = chunks[row].table.blocks[kind] if row < used else ()
                table[row, : len(found)] = [0 if block is None else block for block in found]
                table[row, len(found) :] = spare
                longest = max(longest, len(found))
            blocks, offsets = self._numbers[2 + 2 * kind : 4 + 2 * kind]
            blocks[:] = table[np.arange(self.count), positions // size]
            offsets[:] = positions % size
            moved.append(table[changed, : max(1, longest)])
        if self._on_device.device.type != "cpu":
            self._move(moved)

    def _move(self, parts: Sequence[NDArray[np.int64]]) -> None:
        """Copies the numbers to the device, and the changed rows of the block tables.

        `parts` are the indices of these rows, then their new content in the table of each kind.
        """
        packed = np.concatenate([part.reshape(-1) for part in (self._numbers, *parts)])
        numbers, rows, *tables = upload(torch.from_numpy(packed), self._on_device.device).split(  # type: ignore[no-untyped-call]
            [self._numbers.size, *(part.size for part in parts)]
        )
        self._on_device.copy_(numbers.view(self._on_device.shape))
        if len(rows):
            for metadata, table, part in zip(self.metadata, tables, parts[1:], strict=True):
                metadata.block_table[:, : part.shape[1]].index_copy_(0, rows, table.view(part.shape))


@dataclass(frozen=True)
class Group:
    """Tokens of a pass that attend together: its `rows`, viewed as `shape` (rows, tokens), to `num_keys` keys.

    The keys are those in `blocks` (rows, blocks); None means the keys of the pass itself. Keys `beyond` the last token
    of a row (rows, num_keys) are not its own.
    """

    rows: Tensor
    shape: tuple[int, int]
    attending: Attending
    num_keys: int
    blocks: Tensor | None
    beyond: Tensor | None = None


class PagedAttending:
    """The attention of a pass in all layers of one kind: where its tokens are stored, and which attend together.

    `slot_mapping` is the block of every token, and the offset in it, (N,) each. The paged `kernel` attends for the
    tokens of each of `paged`; the others are in `groups`.
    """

    def __init__(
        self,
        kind: AttentionKind,
        kernel: Callable[..., Tensor] | None,
        slot_mapping: tuple[Tensor, Tensor],
        paged: Sequence[AttentionMetadata],
        groups: Sequence[Group] = (),
    ) -> None:
        self._kind, self._kernel, self.slot_mapping = kind, kernel, slot_mapping
        self._paged, self._groups = paged, groups

    @classmethod
    def of_static(cls, kind: AttentionKind, metadata: AttentionMetadata) -> PagedAttending:
        """The attention of passes over static buffers, for whose tokens a paged kernel attends."""
        return cls(kind, _paged_kernel(kind, native=True), metadata.slot_mapping, [metadata])

    @classmethod
    def of_pass(cls, kind: AttentionKind, current: Pass, number: int, *, native: bool) -> PagedAttending:
        """The attention of a pass in the layers of `kind`, whose blocks have the kind `number`.

        On a CPU all chunks attend in tiles of the paged kernel, if `native`, where a token's result does not depend on
        the rest of the pass. On a GPU with Triton several long chunks do. Otherwise sequences that begin in the pass
        are the documents of one packed row, as in training, and each of the other long chunks has its own kernel. All
        short chunks attend together.
        """
        groups = _Groups(kind, current, number)
        sequences = list(range(len(current.chunks)))
        kernel, paged = _paged_kernel(kind, native), list[AttentionMetadata]()
        if kernel is attend_natively:
            return cls(kind, kernel, groups.slot_mapping, [groups.tiles(sequences)])
        long = [number for number in sequences if current.chunks[number].count > _LONGEST_TOGETHER]
        beginnings = [number for number in long if current.chunks[number].start == 0]
        if kernel is attend_by_triton and long != beginnings[:1]:
            paged.append(groups.tiles(long))
        else:
            groups.add_beginnings(beginnings)
            for sequence in long:
                if sequence not in beginnings:
                    groups.add_chunk(sequence)
        if short := [number for number in sequences if number not in long]:
            if kernel is not None:
                paged.append(groups.metadata(short))
            else:
                groups.add_short(short)
        return cls(kind, kernel, groups.slot_mapping, paged, groups.found)

    @property
    def metadata(self) -> AttentionMetadata | None:
        """The metadata of all tokens of the pass, if a paged kernel attends for all of them."""
        return self._paged[0] if self._is_whole else None

    @property
    def _is_whole(self) -> bool:
        """Whether one paged kernel attends for all tokens."""
        return not self._groups and len(self._paged) == 1

    def attend_blocks(
        self,
        keys: KVBlocks,
        values: KVBlocks,
        q_NH1C: Tensor,
        k_NK1C: Tensor,
        v_NK1C: Tensor,
        score: Score,
        attend_latents: AttendLatents | None = None,
    ) -> Tensor:
        """Attends to the blocks of a layer, which already hold the new `k_NK1C` and `v_NK1C`; (N, H, 1, C).

        Blocks of shared keys and latents are attended to by `attend_latents`.
        """
        out_NH1C = q_NH1C.new_empty(*q_NH1C.shape[:3], self._kind.value_dim)
        for metadata in self._paged:
            assert self._kernel is not None
            q_RHC = (q_NH1C if self._is_whole else q_NH1C[metadata.rows])[:, :, 0].contiguous()
            out_RHC = self._kernel(q_RHC, keys, values, metadata, score, self._kind.slopes)
            if self._is_whole:
                return out_RHC[:, :, None]
            out_NH1C[metadata.rows, :, 0] = out_RHC
        for group in self._groups:
            shape = group.shape
            q_BHTC, k_BKSC, v_BKSC = (_as_rows(x[group.rows], *shape) for x in (q_NH1C, k_NK1C, v_NK1C))
            if group.blocks is not None:
                k_BKSC, v_BKSC = (
                    stored.gather(group.blocks, group.num_keys, group.beyond) for stored in (keys, values)
                )
            if attend_latents is None:
                out_BHTC = group.attending.attend(q_BHTC, k_BKSC, v_BKSC, score)
            else:
                out_BHTC = attend_latents(group.attending, q_BHTC, k_BKSC, v_BKSC)
            out_NH1C[group.rows] = out_BHTC.transpose(1, 2).flatten(0, 1)[:, :, None]
        return out_NH1C

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Raises `ValueError`: attention needs the blocks, which only `attend_blocks` takes."""
        raise ValueError("paged attention reads its keys from blocks; call PagedCache.attend")


def _paged_kernel(kind: AttentionKind, native: bool) -> Callable[..., Tensor] | None:
    """The kernel that attends to blocks without copying them in the layers of `kind`, if there is one."""
    if kind.watched or kind.dropout > 0:
        return None
    if native and attends_natively(kind):
        return attend_natively
    return attend_by_triton if attends_by_triton(kind) else None


class _Groups:
    """The groups of tokens that attend together in the layers of `kind`; `number` is the kind of their blocks."""

    def __init__(self, kind: AttentionKind, current: Pass, number: int) -> None:
        self._kind, self._current, self._number = kind, current, number
        blocks = current.blocks(number, current.sequences, current.positions)
        offsets = current.positions % current.block_size
        self.slot_mapping = upload(blocks, current.device), upload(offsets, current.device)
        self.found: list[Group] = []

    def add_beginnings(self, sequences: list[int]) -> None:
        """Adds sequences whose keys are all in the pass itself, as one row."""
        if not sequences:
            return
        rows = self._current.rows(sequences)
        documents = None
        if len(sequences) > 1:
            documents = upload(self._current.sequences[rows][None], self._current.device)
        self._add(rows, (1, len(rows)), self._kind.sight(len(rows), document_ids=documents), None)

    def add_chunk(self, sequence: int) -> None:
        """Adds a long chunk as its own row."""
        chunk, size = self._current.chunks[sequence], self._current.block_size
        window = self._kind.window
        first = 0 if window is None else max(0, chunk.start - window + 1) // size
        blocks = self._current.block_table(self._number)[sequence : sequence + 1, first : -(-chunk.end // size)]
        sight = self._kind.sight(chunk.count, chunk.end - first * size)
        self._add(self._current.rows([sequence]), (1, chunk.count), sight, blocks)

    def add_short(self, sequences: list[int]) -> None:
        """Adds each token as its own row; the keys of the rows begin and end at different positions."""
        rows, size = self._current.rows(sequences), self._current.block_size
        table, positions = self._current.block_table(self._number), self._current.positions[rows]
        window = self._kind.window
        firsts = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0) // size
        starts = positions - firsts * size
        num_keys = int(starts.max()) + 1
        columns = (firsts[:, None] + torch.arange(-(-num_keys // size))).clamp(max=table.shape[1] - 1)
        ends = upload(starts, self._current.device)
        sight = self._kind.sight(1, num_keys, starts=ends)
        beyond = torch.arange(num_keys, device=ends.device) > ends[:, None]
        self._add(rows, (len(rows), 1), sight, table[self._current.sequences[rows][:, None], columns], beyond)

    def metadata(self, sequences: list[int], tiles: Sequence[tuple[int, int, int, int]] = ()) -> AttentionMetadata:
        """The metadata of the tokens of these sequences, which attend alone or in `tiles`, for a paged kernel."""
        current, device = self._current, self._current.device
        rows = current.rows(sequences)
        table = current.block_table(self._number)[sequences if tiles else current.sequences[rows]]
        rows, table, lasts = (upload(found, device) for found in (rows, table, current.positions[rows]))
        blocks, offsets = self.slot_mapping
        on_device = upload(torch.tensor(tiles), device) if tiles else None
        return AttentionMetadata(rows, table, lasts, (blocks[rows], offsets[rows]), self._kind.window, on_device)

    def tiles(self, sequences: list[int]) -> AttentionMetadata:
        """The metadata of the tokens of these sequences, in tiles."""
        size, tiles, row = tokens_per_tile(self._kind.dtype), list[tuple[int, int, int, int]](), 0
        for number, sequence in enumerate(sequences):
            chunk = self._current.chunks[sequence]
            starts = range(0, chunk.count, size)
            tiles += [(row + at, min(size, chunk.count - at), chunk.start + at, number) for at in starts]
            row += chunk.count
        return self.metadata(sequences, tiles)

    def _add(
        self,
        rows: Tensor,
        shape: tuple[int, int],
        sight: Sight,
        blocks: Tensor | None,
        beyond: Tensor | None = None,
    ) -> None:
        device = self._current.device
        blocks = None if blocks is None else upload(blocks, device)
        attending = prepare_attention(self._kind, sight)
        self.found.append(Group(upload(rows, device), shape, attending, sight.num_keys, blocks, beyond))


def _as_rows(x_NH1C: Tensor, rows: int, tokens: int) -> Tensor:
    """Tokens (B * T, H, 1, C) as (B, H, T, C)."""
    return x_NH1C.view(rows, tokens, x_NH1C.shape[1], x_NH1C.shape[3]).transpose(1, 2)
