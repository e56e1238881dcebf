"""Attention of a pass to keys and values that lie in blocks: which tokens attend together, and by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.generate.blocks import Chunk
from sheepop.generate.held_blocks import HeldBlocks, Places
from sheepop.generate.native_attention import attend_natively, attends_natively
from sheepop.generate.triton_attention import attend_by_triton, attends_by_triton
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.attention.sight import Sight

# Chunks of more tokens attend sequence by sequence, with the kernels of training; shorter ones all together.
_LONGEST_TOGETHER = 8


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


class StandingPass:
    """A pass of `count` single tokens whose tensors stay where they are; see `Pass`, from which they are filled."""

    def __init__(
        self,
        count: int,
        longest: int,
        block_size: int,
        windows: Sequence[int | None],
        spare_blocks: Sequence[int],
        device: torch.device,
    ) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.count, self.longest, self._windows, self._spare_blocks = count, longest, windows, spare_blocks
        self.input_ids, self.device_positions = numbers(count, 1), numbers(count)
        width = -(-longest // block_size)
        self.places = [
            Places(numbers(count), numbers(count, width), *(numbers(count) for _ in range(4))) for _ in windows
        ]

    def fill(self, token_ids: Sequence[int], now: Pass) -> None:
        """Copies what a pass of as many tokens or fewer reads; the others are at the beginning of a spare block."""
        more = self.count - len(token_ids)
        self._copy(self.input_ids, torch.tensor(token_ids)[:, None], more)
        self._copy(self.device_positions, now.positions, more)
        for number, (places, window) in enumerate(zip(self.places, self._windows, strict=True)):
            lasts, table = now.positions, now.table(number)
            firsts = _first_places(lasts, window)
            spare = self._spare_blocks[number]
            self._copy(places.table[:, : table.shape[1]], table, more, spare)
            self._copy(places.firsts, firsts, more)
            self._copy(places.lasts, lasts, more)
            self._copy(places.blocks, now.blocks(number, now.sequences, lasts), more, spare)
            self._copy(places.slots, lasts % now.block_size, more)

    @staticmethod
    def _copy(target: Tensor, source: Tensor, more: int, missing: int = 0) -> None:
        target.copy_(torch.cat((source, source.new_full((more, *source.shape[1:]), missing))))


@dataclass(frozen=True)
class Group:
    """Tokens of a pass that attend together: `rows` of the pass, as `shape` (rows, tokens), to the keys of `blocks`.

    `blocks` (rows, blocks) are None where the keys are those of the pass itself; `num_keys` of them are seen.
    """

    rows: Tensor
    shape: tuple[int, int]
    attending: Attending
    num_keys: int
    blocks: Tensor | None


class PagedAttending:
    """What the layers of a kind share in a pass: where its tokens are stored, and which of them attend together.

    `targets` are the block and the slot of every token (N,). Tokens with `places` read their keys where they lie; the
    others are in `groups`.
    """

    def __init__(
        self, kind: AttentionKind, targets: tuple[Tensor, Tensor], places: Places | None, groups: Sequence[Group] = ()
    ) -> None:
        self._kind, self.targets, self._places, self._groups = kind, targets, places, groups

    @classmethod
    def of_pass(cls, kind: AttentionKind, now: Pass, number: int, *, native: bool, apart: bool) -> PagedAttending:
        """For the layers with kind `number` of blocks.

        Texts that begin in the pass are the documents of one packed row, as in training; a long chunk of any other
        text has a kernel of its own; all short ones attend together, where the CPU's kernel may do so if `native`.
        With `apart` every token is a short one, so that what becomes of it does not depend on what else is read.
        """
        groups = _Groups(kind, now, number)
        sequences = range(len(now.chunks))
        long = [number for number in sequences if now.chunks[number].count > _LONGEST_TOGETHER and not apart]
        groups.add_beginnings([number for number in long if now.chunks[number].start == 0])
        for sequence in long:
            if now.chunks[sequence].start > 0:
                groups.add_chunk(sequence)
        short = [number for number in sequences if number not in long]
        if not short:
            return cls(kind, groups.targets, None, groups.found)
        if _reader(kind, native) is not None:
            return cls(kind, groups.targets, groups.places(short), groups.found)
        groups.add_short(short)
        return cls(kind, groups.targets, None, groups.found)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where the new tokens are stored: their blocks and places (N,)."""
        return self.targets

    @property
    def places(self) -> Places | None:
        """Those of all tokens of the pass, where the keys of all are read where they lie."""
        return None if self._groups else self._places

    def over(
        self, keys: HeldBlocks, values: HeldBlocks, q_NH1C: Tensor, k_NK1C: Tensor, v_NK1C: Tensor, score: Score
    ) -> Tensor:
        """Attends to the blocks of a layer, which already hold the new `k_NK1C` and `v_NK1C`; (N, H, 1, C)."""
        out_NH1C = q_NH1C.new_empty(*q_NH1C.shape[:3], v_NK1C.shape[-1])
        if self._places is not None:
            rows, alone, read = self._places.rows, self.places is not None, _reader(self._kind, native=True)
            assert read is not None
            q_RHC = (q_NH1C if alone else q_NH1C[rows])[:, :, 0].contiguous()
            out_RHC = read(q_RHC, keys, values, self._places, score, self._kind.slopes)
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


def _reader(kind: AttentionKind, native: bool) -> Callable[..., Tensor] | None:
    """What attends to keys where they lie in the layers of a kind."""
    if kind.watched or kind.dropout > 0:
        return None
    if native and attends_natively(kind):
        return attend_natively
    return attend_by_triton if attends_by_triton(kind) else None


class _Groups:
    """Puts the tokens of a pass together for the layers of a kind, whose blocks are those of kind `number`."""

    def __init__(self, kind: AttentionKind, now: Pass, number: int) -> None:
        self._kind, self._now, self._number = kind, now, number
        blocks = now.blocks(number, now.sequences, now.positions)
        self.targets = blocks.to(now.device), (now.positions % now.block_size).to(now.device)
        self.found: list[Group] = []

    def add_beginnings(self, sequences: list[int]) -> None:
        """Whole rows of keys are in the pass itself."""
        if not sequences:
            return
        rows = self._now.rows(sequences)
        documents = None if len(sequences) == 1 else self._now.sequences[rows][None].to(self._now.device)
        self._add(rows, (1, len(rows)), self._kind.sight(len(rows), document_ids=documents), None)

    def add_chunk(self, sequence: int) -> None:
        """A row of its own."""
        chunk, size = self._now.chunks[sequence], self._now.block_size
        first = _first_block(chunk.start, self._kind.window, size)
        blocks = self._now.table(self._number)[sequence : sequence + 1, first : -(-chunk.end // size)]
        sight = self._kind.sight(chunk.count, chunk.end - first * size)
        self._add(self._now.rows([sequence]), (1, chunk.count), sight, blocks)

    def add_short(self, sequences: list[int]) -> None:
        """Each token is a row of its own, beside others whose keys begin and end elsewhere."""
        rows, table, size = self._now.rows(sequences), self._now.table(self._number), self._now.block_size
        places = self._now.positions[rows]
        firsts = torch.tensor([_first_block(place, self._kind.window, size) for place in places.tolist()])
        starts = places - firsts * size
        num_keys = int(starts.max()) + 1
        columns = (firsts[:, None] + torch.arange(-(-num_keys // size))).clamp(max=table.shape[1] - 1)
        sight = self._kind.sight(1, num_keys, starts=starts.to(self._now.device))
        self._add(rows, (len(rows), 1), sight, table[self._now.sequences[rows][:, None], columns])

    def places(self, sequences: list[int]) -> Places:
        """Where a kernel finds the keys of these."""
        rows, window, device = self._now.rows(sequences), self._kind.window, self._now.device
        lasts = self._now.positions[rows]
        firsts = _first_places(lasts, window)
        table = self._now.table(self._number)[self._now.sequences[rows]].contiguous()
        rows, table, firsts, lasts = (found.to(device) for found in (rows, table, firsts, lasts))
        blocks, slots = (target[rows] for target in self.targets)
        return Places(rows, table, firsts, lasts, blocks, slots)

    def _add(self, rows: Tensor, shape: tuple[int, int], sight: Sight, blocks: Tensor | None) -> None:
        device = self._now.device
        blocks = None if blocks is None else blocks.to(device)
        attending = prepare_attention(self._kind, sight)
        self.found.append(Group(rows.to(device), shape, attending, sight.num_keys, blocks))


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The first block that a query at this position sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _first_places(lasts: Tensor, window: int | None) -> Tensor:
    """The first places that tokens at these places see."""
    return torch.zeros_like(lasts) if window is None else (lasts - window + 1).clamp(min=0)


def _as_rows(x_NH1C: Tensor, rows: int, tokens: int) -> Tensor:
    """Tokens (B * T, H, 1, C) as (B, H, T, C)."""
    return x_NH1C.view(rows, tokens, x_NH1C.shape[1], x_NH1C.shape[3]).transpose(1, 2)
