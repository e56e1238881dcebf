"""Keys and values in blocks: what the block tables of many sequences name, as tensors that attention reads.

A pass reads N tokens of many sequences, each as a row of its own (N, 1): chunks of prompts and single new tokens lie
side by side without padding. Shapes: N tokens of a pass, R sequences, K key-value heads, C head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sheepop.adapt.native_products import wants_native_kernels
from sheepop.generate.blocks import Chunk, Copy
from sheepop.generate.held_blocks import HeldBlocks, Places
from sheepop.generate.paged_attention import PagedAttending, Pass, StandingPass
from sheepop.model import Transformer
from sheepop.model.attention.kernel import Attending, AttentionKind, Score
from sheepop.model.cache import Cache


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


def bytes_per_block(model: Transformer, block_size: int, lookahead: int = 0, *, in_int8: bool = False) -> int:
    """What a block of every kind takes together."""
    config = model.config
    numbers = config.head_size + config.value_size
    per_head = numbers + 2 * torch.float32.itemsize if in_int8 else numbers * model.dtype.itemsize
    per_token = config.num_layers * config.kv_heads * per_head
    width = min(block_size, num_preceding(model) + lookahead)
    channels = 0
    if config.short_convolution is not None:
        channels = config.num_heads * config.head_size + config.kv_heads * (config.head_size + config.value_size)
    return block_size * per_token + width * config.num_layers * channels * model.dtype.itemsize


class PagedCache(Cache):
    """The blocks of all layers, (num_blocks, K, block_size, C) each, allocated once.

    `num_blocks` are those of each kind in `reaches_of`. `lookahead` tokens of a pass may be taken back after it. Keys
    and values are held `in_int8` or in the model's data type; tokens that are read `apart` attend each by itself.
    """

    def __init__(
        self,
        model: Transformer,
        num_blocks: Sequence[int],
        block_size: int,
        *,
        lookahead: int = 0,
        in_int8: bool = False,
        apart: bool = False,
    ) -> None:
        config, self.device = model.config, model.device
        self.reaches = reaches_of(model)
        self.block_size = block_size
        self._native, self._apart = apart or wants_native_kernels(model), apart
        self._kind_of_layer = [self.reaches.index(window) for window in model.windows]
        self._kind_of_window = {window: self.reaches.index(window) for window in model.windows}

        self._spare_blocks = list(num_blocks)  # behind those that are managed

        def held(width: int) -> list[HeldBlocks]:
            counts = [num_blocks[kind] for kind in self._kind_of_layer]
            shapes = [(count + 1, config.kv_heads, block_size, width) for count in counts]
            return [HeldBlocks(shape, model.dtype, model.device, in_int8=in_int8) for shape in shapes]

        self.keys, self.values = held(config.head_size), held(config.value_size)
        # The last tokens of each block at a place, token p in column p % width.
        self._tails: dict[str, Tensor] = {}
        self._tail_width = min(block_size, num_preceding(model) + lookahead)
        self._num_tail_blocks = num_blocks[-1]
        # An encoder's keys and values for the sources of the last pass.
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._sources: list[int] = []
        self._pass: Pass | None = None
        self._standing: StandingPass | None = None

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks, as `BlockManager.reserve` asks for it."""
        for kind in {copy.kind for copy in copies}:
            source, target = (
                torch.tensor([getattr(copy, end) for copy in copies if copy.kind == kind], device=self.device)
                for end in ("source", "target")
            )
            for layer, of_layer in enumerate(self._kind_of_layer):
                if of_layer == kind:
                    self.keys[layer].copy(target, source)
                    self.values[layer].copy(target, source)
            if kind == len(self.reaches) - 1:
                for tail in self._tails.values():
                    tail[target] = tail[source]

    def read(
        self, chunks: Sequence[Chunk], sources: Sequence[int] | None = None, longest_source: int | None = None
    ) -> None:
        """Says what the tokens of the next pass are, in this order.

        `sources` number the texts that an encoder read for each chunk; the longest has `longest_source` tokens.
        """
        self._pass, self._standing = Pass(chunks, self.block_size, self.device), None
        numbers = sources or [0] * len(chunks)
        before = self._sources
        self._sources = [source for source, chunk in zip(numbers, chunks, strict=True) for _ in range(chunk.count)]
        if set(self._sources) <= set(before):
            if self._sources != before:
                rows = torch.tensor([before.index(source) for source in self._sources], device=self.device)
                # Of those that ended one may have been the longest.
                self._memory = {
                    layer: (keys_BKSC[rows, :, :longest_source], values_BKSC[rows, :, :longest_source])
                    for layer, (keys_BKSC, values_BKSC) in self._memory.items()
                }
        else:
            self._memory = {}

    def standing_pass(self, count: int, longest: int) -> StandingPass:
        """One of `count` single tokens, of texts with at most `longest`."""
        return StandingPass(count, longest, self.block_size, self.reaches, self._spare_blocks, self.device)

    def read_again(self, standing: StandingPass) -> None:
        """Says that the tokens of the next pass are those that are named in memory that stays."""
        self._standing = standing

    @property
    def _now(self) -> Pass:
        assert self._pass is not None, "the cache was not told which tokens come"
        return self._pass

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """The positions (N, 1) of the tokens that `read` told of, and how many the longest sequence will hold."""
        if self._standing is not None:
            return self._standing.device_positions[:, None], self._standing.longest
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
        number = self._kind_of_window[kind.window]
        if self._standing is not None:
            places = self._standing.places[number]
            return PagedAttending(kind, (places.blocks, places.slots), places)
        return PagedAttending.of_pass(kind, self._now, number, native=self._native, apart=self._apart)

    def places(self, attending: Attending) -> Places | None:
        """Where the keys of all tokens of the pass are, if a kernel reads all of them there."""
        return attending.places if isinstance(attending, PagedAttending) else None

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends, each token to its own sequence up to itself."""
        assert isinstance(attending, PagedAttending)
        blocks, slots = attending.targets
        keys, values = self.keys[layer], self.values[layer]
        k_NK1C = keys.store(blocks, slots, k_BKTC[:, :, 0])[:, :, None]
        v_NK1C = values.store(blocks, slots, v_BKTC[:, :, 0])[:, :, None]
        return attending.over(keys, values, q_BHTC, k_NK1C, v_NK1C, score)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `project` gave when the layer first asked, as long as no source comes that was not there."""
        if layer not in self._memory:
            self._memory[layer] = project()
        return self._memory[layer]
