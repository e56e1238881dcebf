"""Keys and values in blocks: what the block tables of many sequences name, as tensors that attention reads.

A pass reads N tokens of many sequences, each as a row of its own (N, 1): chunks of prompts and single new tokens lie
side by side without padding. Shapes: N tokens of a pass, R sequences, K key-value heads, C head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.generate.blocks import Chunk, Copy
from sheepop.generate.native_attention import NativeAttention, native_attention
from sheepop.model import Transformer
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.attention.sight import Sight

# Chunks of more tokens attend sequence by sequence, with the kernels of training; shorter ones all together.
_LONGEST_TOGETHER = 8


def reaches_of(model: Transformer) -> tuple[int | None, ...]:
    """How far each kind of the model's layers looks back, as `BlockManager` takes it.

    The last kind is that of the `preceding` tokens of n-grams and short convolutions, where there are any.
    """
    windows: tuple[int | None, ...] = tuple(dict.fromkeys(model.windows))
    preceding = num_preceding(model)
    return (*windows, preceding + 1) if preceding else windows


def num_preceding(model: Transformer) -> int:
    """How many tokens before it a token needs beside keys and values."""
    config = model.config
    orders = config.ngrams.orders if config.ngrams is not None else ()
    return max(0, *(order - 1 for order in orders), (config.short_convolution or 1) - 1)


def bytes_per_block(model: Transformer, block_size: int, lookahead: int = 0) -> int:
    """What a block of every kind takes together."""
    config = model.config
    per_token = config.num_layers * config.kv_heads * (config.head_size + config.value_size) * model.dtype.itemsize
    width = min(block_size, num_preceding(model) + lookahead)
    channels = 0
    if config.short_convolution is not None:
        channels = config.num_heads * config.head_size + config.kv_heads * (config.head_size + config.value_size)
    return block_size * per_token + width * config.num_layers * channels * model.dtype.itemsize


class PagedCache:
    """The blocks of all layers, (num_blocks, K, block_size, C) each, allocated once.

    `num_blocks` are those of each kind in `reaches_of`. `lookahead` tokens of a pass may be taken back after it.
    """

    def __init__(self, model: Transformer, num_blocks: Sequence[int], block_size: int, *, lookahead: int = 0) -> None:
        config = model.config
        self.reaches = reaches_of(model)
        self.block_size = block_size
        self._kind_of_layer = [self.reaches.index(window) for window in model.windows]
        self._kind_of_window = {window: self.reaches.index(window) for window in model.windows}

        def empty_blocks(layer: int, width: int) -> Tensor:
            shape = num_blocks[self._kind_of_layer[layer]], config.kv_heads, block_size, width
            return torch.zeros(shape, device=model.device, dtype=model.dtype)

        self.keys = [empty_blocks(layer, config.head_size) for layer in range(config.num_layers)]
        self.values = [empty_blocks(layer, config.value_size) for layer in range(config.num_layers)]
        # The last tokens of each block at a place, token p in column p % width.
        self._tails: dict[str, Tensor] = {}
        self._tail_width = min(block_size, num_preceding(model) + lookahead)
        self._num_tail_blocks = num_blocks[-1]
        # An encoder's keys and values for the sources of the last pass.
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._sources: list[int] = []
        self._pass: _Pass | None = None

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks, as `BlockManager.reserve` asks for it."""
        for kind in {copy.kind for copy in copies}:
            source, target = (
                torch.tensor([getattr(copy, end) for copy in copies if copy.kind == kind], device=self.keys[0].device)
                for end in ("source", "target")
            )
            for layer, of_layer in enumerate(self._kind_of_layer):
                if of_layer == kind:
                    self.keys[layer][target] = self.keys[layer][source]
                    self.values[layer][target] = self.values[layer][source]
            if kind == len(self.reaches) - 1:
                for tail in self._tails.values():
                    tail[target] = tail[source]

    def read(self, chunks: Sequence[Chunk], sources: Sequence[int] | None = None, longest_source: int = 0) -> None:
        """Says what the tokens of the next pass are, in this order.

        `sources` number the texts that an encoder read for each chunk, the longest of which has `longest_source` tokens.
        """
        self._pass = _Pass(chunks, self.block_size, self.keys[0].device)
        numbers = sources or [0] * len(chunks)
        before = self._sources
        self._sources = [source for source, chunk in zip(numbers, chunks, strict=True) for _ in range(chunk.count)]
        if set(self._sources) <= set(before):
            if self._sources != before:
                rows = torch.tensor([before.index(source) for source in self._sources], device=self.keys[0].device)
                # Of those that ended one may have been the longest.
                self._memory = {
                    layer: (keys_BKSC[rows, :, :longest_source], values_BKSC[rows, :, :longest_source])
                    for layer, (keys_BKSC, values_BKSC) in self._memory.items()
                }
        else:
            self._memory = {}

    @property
    def _now(self) -> _Pass:
        assert self._pass is not None, "the cache was not told which tokens come"
        return self._pass

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """The positions (N, 1) of the tokens that `read` told of, and how many the longest sequence will hold."""
        now = self._now
        if (num_rows, num_tokens) != (len(now.positions), 1):
            raise ValueError(
                f"a paged cache reads every token as a row of its own, and expects {len(now.positions)} of them; "
                f"{num_rows} rows of {num_tokens} were given"
            )
        return now.device_positions[:, None], max(chunk.end for chunk in now.chunks)

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """The `count` entries before each token (N, count, ...), of this pass or of those before it."""
        kind, width = len(self.reaches) - 1, self._tail_width
        tail = self._tails.get(place)
        if tail is None:
            tail = self._tails[place] = new.new_zeros(self._num_tail_blocks, width, *new.shape[2:])
        now, steps = self._now, torch.arange(-count, 0)
        positions = now.positions[:, None] + steps
        earlier = positions.clamp(min=0)
        blocks = now.blocks(kind, now.sequences[:, None].expand_as(earlier), earlier)
        rows = (torch.arange(len(new))[:, None] + steps).clamp(min=0)
        in_pass, exists = positions >= now.starts[:, None], positions >= 0
        shape = (*exists.shape, *(1 for _ in new.shape[2:]))
        held = torch.where(in_pass.view(shape), new[rows, 0], tail[blocks, earlier % width])
        last = now.last_of_blocks(width)
        targets = now.blocks(kind, now.sequences[last], now.positions[last]), now.positions[last] % width
        tail[targets] = new[last, 0]
        return held * exists.view(shape)

    def prepare(self, kind: AttentionKind) -> Attending:
        """A kernel for each long chunk, and one for all short ones."""
        return PagedAttending(kind, self._now, self._kind_of_window[kind.window])

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends, each token to its own sequence up to itself."""
        assert isinstance(attending, PagedAttending)
        blocks, slots = attending.targets
        self.keys[layer][blocks, :, slots] = k_BKTC[:, :, 0]
        self.values[layer][blocks, :, slots] = v_BKTC[:, :, 0]
        return attending.over(self.keys[layer], self.values[layer], q_BHTC, k_BKTC, v_BKTC, score)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `project` gave when the layer first asked, as long as no source comes that was not there."""
        if layer not in self._memory:
            self._memory[layer] = project()
        return self._memory[layer]


class _Pass:
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
class _Native:
    """Tokens of a pass whose keys are read where they lie: the blocks of each, and the first and last place it sees."""

    rows: Tensor
    attend: NativeAttention
    table: Tensor
    firsts: Tensor
    lasts: Tensor


class PagedAttending:
    """What the layers of a kind share in a pass.

    Texts that begin in it are the documents of one packed row, as in training; a long chunk of any other text has a
    kernel of its own; all short ones attend together.
    """

    def __init__(self, kind: AttentionKind, now: _Pass, number: int) -> None:
        self._kind, self._now, self._number = kind, now, number
        blocks = now.blocks(number, now.sequences, now.positions)
        self.targets = blocks.to(now.device), (now.positions % now.block_size).to(now.device)
        self._groups: list[_Group] = []
        self._native: _Native | None = None
        sequences = range(len(now.chunks))
        long = [number for number in sequences if now.chunks[number].count > _LONGEST_TOGETHER]
        self._add_beginnings([number for number in long if now.chunks[number].start == 0])
        for sequence in long:
            if now.chunks[sequence].start > 0:
                self._add_chunk(sequence)
        self._add_short([number for number in sequences if now.chunks[number].count <= _LONGEST_TOGETHER])

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
        if (attend := native_attention(self._kind)) is not None:
            window = self._kind.window
            firsts = torch.zeros_like(places) if window is None else (places - window + 1).clamp(min=0)
            self._native = _Native(rows, attend, table[self._now.sequences[rows]].contiguous(), firsts, places)
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

    def over(
        self, keys: Tensor, values: Tensor, q_NH1C: Tensor, k_NK1C: Tensor, v_NK1C: Tensor, score: Score
    ) -> Tensor:
        """Attends to the blocks `keys` and `values` of a layer, which already hold the new ones; (N, H, 1, C)."""
        out_NH1C = q_NH1C.new_empty(*q_NH1C.shape[:3], v_NK1C.shape[-1])
        if self._native is not None:
            native = self._native
            q_RHC = q_NH1C[native.rows, :, 0].contiguous()
            out_NH1C[native.rows, :, 0] = native.attend(
                q_RHC, keys, values, native.table, native.firsts, native.lasts, score, self._kind.slopes
            )
        for group in self._groups:
            rows, tokens = group.shape
            q_BHTC, k_BKSC, v_BKSC = (_as_rows(x[group.rows], rows, tokens) for x in (q_NH1C, k_NK1C, v_NK1C))
            if group.blocks is not None:
                k_BKSC, v_BKSC = (_gather(held, group.blocks, group.num_keys) for held in (keys, values))
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


def _gather(held: Tensor, blocks: Tensor, num_keys: int) -> Tensor:
    """The first keys of these blocks (B, blocks), one behind the other: (B, K, S, C)."""
    heads = torch.arange(held.shape[1], device=held.device)[:, None]
    return held[blocks[:, None, :], heads].flatten(2, 3)[:, :, :num_keys]
