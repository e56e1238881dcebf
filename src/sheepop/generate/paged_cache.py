"""The paged KV cache: the tensors of the blocks that block tables list, and attention over them.

A forward pass reads N tokens of many sequences, each as its own row (N, 1), so that chunks of prompts and single new
tokens need no padding. Shapes: N tokens of a pass, R sequences, K key-value heads, C head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sheepop.adapt.native_products import wants_native_kernels
from sheepop.core.device import has_fp8
from sheepop.core.errors import DeviceError
from sheepop.generate.blocks import BlockManager, Chunk, Copy, blocks_held
from sheepop.generate.config import CacheDtype
from sheepop.generate.paged_attention import PagedAttending, Pass, StaticPass
from sheepop.generate.paged_kernels import LARGEST, AttentionMetadata, KVBlocks, grown, zeros
from sheepop.generate.transfers import synchronize, upload
from sheepop.model import Transformer
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.cache import AttendLatents, LatentCache, Recurrence

_NO_BLOCK = -1  # the last block of a tail, which belongs to no sequence
_FIRST_SHARE, _FEWEST_AT_FIRST = 16, 128


def _num_at_first(num_blocks: int, device: torch.device) -> int:
    """How many of `num_blocks` blocks exist at first: all on a CPU, where they take memory only when they are used."""
    return num_blocks if device.type == "cpu" else min(num_blocks, max(num_blocks // _FIRST_SHARE, _FEWEST_AT_FIRST))


def reaches_of(model: Transformer) -> tuple[int | None, ...]:
    """How many tokens back each kind of layer reads, itself included, as `BlockManager` takes it; None is all.

    If the model has n-grams, convolutions or recurrent states, the last kind is theirs.
    """
    windows: tuple[int | None, ...] = tuple(dict.fromkeys(model.windows))
    preceding = num_preceding(model)
    return (*windows, preceding + 1) if preceding else windows


def num_preceding(model: Transformer) -> int:
    """How many preceding tokens the model's n-grams and convolutions read for each token."""
    config = model.config
    orders = config.ngrams.orders if config.ngrams is not None else ()
    sections = (config.gated_convolution, config.gated_delta_net)
    widths = (config.short_convolution or 1, *(section.width for section in sections if section is not None))
    return max(0, *(order - 1 for order in orders), *(width - 1 for width in widths))


def block_manager(
    model: Transformer, num_blocks: int, block_size: int, *, max_sequences: int, lookahead: int = 0
) -> BlockManager:
    """The manager of `num_blocks` blocks of each kind; of recurrent states only as many as `max_sequences` need."""
    reaches = reaches_of(model)
    counts = [num_blocks] * len(reaches)
    spans: list[int | None] = [None] * len(reaches)
    if model.config.gated_delta_net is not None:
        reaches = (*reaches[:-1], _reach_of_states(model))
        spans[-1] = num_preceding(model) + lookahead
        counts[-1] = min(num_blocks, max_sequences * _blocks_with_states(model, block_size, lookahead))
    return BlockManager(counts, reaches, block_size, spans)


def _blocks_with_states(model: Transformer, block_size: int, lookahead: int) -> int:
    """The blocks with recurrent states that one sequence needs."""
    return blocks_held(_reach_of_states(model), num_preceding(model) + lookahead, block_size)


def _reach_of_states(model: Transformer) -> int:
    """How many of its last tokens a sequence with recurrent states keeps: a drafter may read the newest one again."""
    return num_preceding(model) + 2


def stored_dtype(model: Transformer, cache_dtype: CacheDtype) -> torch.dtype:
    """The data type in which the model's keys and values are cached; raises `DeviceError` if its device has none."""
    device = model.device.type
    if cache_dtype == "fp8" and (device == "mps" or (device == "cuda" and not has_fp8(model.device))):
        raise DeviceError(
            f"cache_dtype = fp8 needs a CPU, or a GPU that computes in 8-bit floats (Ada, Hopper or newer), which the "
            f"device {model.device} is not. Take int8, which is as small."
        )
    chosen = {"auto": model.cache_dtype or model.dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return chosen[cache_dtype]


def bytes_per_block(
    model: Transformer, block_size: int, lookahead: int = 0, *, cache_dtype: CacheDtype = "auto"
) -> int:
    """The bytes of one block in all layers together, without recurrent states."""
    attending = (layer for layer, kind in enumerate(model.kinds) if kind is not None)
    stored, per_token = stored_dtype(model, cache_dtype), 0
    scales = 2 * torch.float32.itemsize if stored in LARGEST else 0
    for heads, *widths in map(model.config.cached_heads, attending):
        per_token += heads * (sum(widths) * stored.itemsize + scales)
    return block_size * per_token + _bytes_of_tails(model, block_size, lookahead)


def state_bytes(model: Transformer, max_sequences: int, block_size: int, lookahead: int = 0) -> int:
    """The bytes of the recurrent states of `max_sequences` sequences, in all layers together."""
    delta = model.config.gated_delta_net
    if delta is None:
        return 0
    columns = max_sequences * _blocks_with_states(model, block_size, lookahead) * min(block_size, 1 + lookahead)
    return columns * len(delta.layers) * delta.state_size * torch.float32.itemsize


def _bytes_of_tails(model: Transformer, block_size: int, lookahead: int) -> int:
    config, channels = model.config, 0
    if config.short_convolution is not None:
        for layer in (layer for layer, kind in enumerate(model.kinds) if kind is not None):
            kv_heads, key_width, value_width = config.heads(layer)
            channels += config.num_heads * key_width + kv_heads * (key_width + value_width)
    if config.gated_convolution is not None:
        channels += len(config.gated_convolution.layers) * config.d_model
    if (delta := config.gated_delta_net) is not None:
        channels += len(delta.layers) * (2 * delta.key_width + delta.value_width)
    return min(block_size, num_preceding(model) + lookahead) * channels * model.dtype.itemsize


class PagedCache(LatentCache):
    """The blocks of all layers, (num_blocks, K, block_size, C) each; on a GPU there are fewer until they are used.

    Latent attention stores its shared rotary keys as the keys of one head, and its latents as the values.
    `num_blocks` has one count per kind of `reaches_of`. Up to `lookahead` tokens may be dropped after a pass. If
    `batch_invariant`, tokens of small networks attend in the CPU's kernel too, in which none depends on the others.
    """

    def __init__(
        self,
        model: Transformer,
        num_blocks: Sequence[int],
        block_size: int,
        *,
        lookahead: int = 0,
        cache_dtype: CacheDtype = "auto",
        batch_invariant: bool = False,
    ) -> None:
        self.device = model.device
        self.reaches = reaches_of(model)
        self.block_size = block_size
        self.is_native, self.batch_invariant = batch_invariant or wants_native_kernels(model), batch_invariant
        # None for layers that store nothing: those without attention, or with the keys and values of another layer.
        self._kind_of_layer = [
            None if kind is None or layer in model.kv_sources else self.reaches.index(kind[0])
            for layer, kind in enumerate(model.kinds)
        ]
        self._kind_of_window = {window: self.reaches.index(window) for window in model.windows}

        # The blocks that exist; there is one more, which the manager hands out only once there are more.
        self._most, self._num_blocks = list(num_blocks), [_num_at_first(count, self.device) for count in num_blocks]

        def allocated(of_values: bool) -> list[KVBlocks]:
            counts = [0 if kind is None else self._num_blocks[kind] + 1 for kind in self._kind_of_layer]
            cached, stored = map(model.config.cached_heads, range(len(counts))), stored_dtype(model, cache_dtype)
            shapes = [
                (count, heads.kv_heads, block_size, heads.value_width if of_values else heads.key_width)
                for count, heads in zip(counts, cached, strict=True)
            ]
            return [KVBlocks(shape, model.dtype, model.device, stored) for shape in shapes]

        self.keys, self.values = allocated(False), allocated(True)
        # The last inputs of each block, for each n-gram or convolution, and the last states; those of the token at
        # position p are in column p % width. One more block takes what belongs to none.
        self._tails: dict[str, Tensor] = {}
        self._tail_width = min(block_size, num_preceding(model) + lookahead)
        self._state_width = min(block_size, 1 + lookahead)
        # An encoder's keys and values for the sources of the last pass.
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._sources: list[int] = []
        self._pass: Pass | None = None
        self.static: StaticPass | None = None  # if set, the next pass reads the tokens in these buffers

    def make_room(self, chunks: Sequence[Chunk], copies: Sequence[Copy]) -> bool:
        """Makes the blocks that are written next, and as many again; returns whether any had to be made.

        All blocks move then, which waits for the device. Raises `DeviceError` if there is no memory for them.
        """
        if self._num_blocks == self._most:
            return False
        needed = list(self._num_blocks)
        for copy in copies:
            needed[copy.kind] = max(needed[copy.kind], copy.target + 1)
        for table, start, count in chunks:
            new = slice(start // self.block_size, -(-(start + count) // self.block_size))
            for kind, blocks in enumerate(table.blocks):
                needed[kind] = max(needed[kind], *(1 + block for block in blocks[new] if block is not None), 0)
        if needed == self._num_blocks:
            return False
        sizes = zip(needed, self._num_blocks, self._most, strict=True)
        counts = [max(count, min(most, 2 * had)) if count > had else had for count, had, most in sizes]
        synchronize(self.device)
        try:
            for of_layer, keys, values in zip(self._kind_of_layer, self.keys, self.values, strict=True):
                if of_layer is not None and counts[of_layer] > self._num_blocks[of_layer]:
                    keys.grow(counts[of_layer] + 1)
                    values.grow(counts[of_layer] + 1)
            self._tails = {place: grown(tail, counts[-1] + 1) for place, tail in self._tails.items()}
        except torch.OutOfMemoryError:
            raise DeviceError(
                f"{self.device} has no memory for {max(counts)} blocks of the cache, which may have {max(self._most)}. "
                "Other programs may have taken it since the start. Give the cache less memory."
            ) from None
        self._num_blocks = counts
        return True

    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes the copies of blocks that `BlockManager.reserve` returned."""
        for kind in {copy.kind for copy in copies}:
            source, target = (
                upload(torch.tensor([getattr(copy, end) for copy in copies if copy.kind == kind]), self.device)
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
        """Sets the tokens of the next pass: those of `chunks`, in order.

        `sources` numbers the text that the encoder read for each chunk; the longest has `longest_source` tokens.
        """
        self._pass, self.static = Pass(chunks, self.block_size, self.device), None
        numbers = sources or [0] * len(chunks)
        before = self._sources
        self._sources = [source for source, chunk in zip(numbers, chunks, strict=True) for _ in range(chunk.count)]
        if set(self._sources) <= set(before):
            if self._sources != before:
                rows = upload(torch.tensor([before.index(source) for source in self._sources]), self.device)
                # The longest source may have been that of a request that has ended.
                self._memory = {
                    layer: (keys_BKSC[rows, :, :longest_source], values_BKSC[rows, :, :longest_source])
                    for layer, (keys_BKSC, values_BKSC) in self._memory.items()
                }
        else:
            self._memory = {}

    def static_pass(self, count: int, longest: int) -> StaticPass:
        """The static buffers for passes of `count` single tokens, of sequences with at most `longest` tokens."""
        return StaticPass(count, longest, self.block_size, self.reaches, self._num_blocks, self.device)

    @property
    def _current(self) -> Pass:
        assert self._pass is not None, "call read() before a pass"
        return self._pass

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """The positions (N, 1) of the tokens that `read` set, and the length of the longest sequence after the pass."""
        if self.static is not None:
            return self.static.device_positions[:, None], self.static.longest
        current = self._current
        if (num_rows, num_tokens) != (len(current.positions), 1):
            raise ValueError(
                f"a paged cache reads every token as its own row and expects {len(current.positions)} of them, "
                f"not {num_rows} rows of {num_tokens}"
            )
        return current.device_positions[:, None], max(chunk.end for chunk in current.chunks)

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """The `count` entries before each token (N, count, ...), from this pass or earlier ones; 0 if there are none.

        `place` names the n-gram or convolution; `new` (N, 1, ...) are the entries of this pass.
        """
        kind, width = len(self.reaches) - 1, self._tail_width
        tail = self._tail(place, width, new[0, 0])
        current, steps = self._current, torch.arange(-count, 0)
        positions = current.positions[:, None] + steps
        earlier = positions.clamp(min=0)
        blocks = current.blocks(kind, current.sequences[:, None].expand_as(earlier), earlier, _NO_BLOCK)
        rows = (torch.arange(len(new))[:, None] + steps).clamp(min=0)
        in_pass, exists = positions >= current.starts[:, None], positions >= 0
        shape = (*exists.shape, *(1 for _ in new.shape[2:]))
        last = current.last_of_blocks(width)
        last_positions = current.positions[last]
        last_blocks = current.blocks(kind, current.sequences[last], last_positions, _NO_BLOCK)
        in_pass, exists, rows, blocks, columns, last, last_blocks, last_columns = (
            upload(index, self.device)
            for index in (
                *(in_pass.view(shape), exists.view(shape), rows, blocks, earlier % width),
                *(last, last_blocks, last_positions % width),
            )
        )
        found = torch.where(in_pass, new[rows, 0], tail[blocks, columns])
        tail[last_blocks, last_columns] = new[last, 0]
        return torch.where(exists, found, 0)  # what belongs to no sequence may be NaN

    def recur(self, place: str, recurrence: Recurrence, start: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs (N, 1, ...) of a recurrence along each sequence; sequences of equal chunks run together.

        It stops at each token whose state is stored: the last ones of the blocks that a sequence has.
        """
        width, current = self._state_width, self._current
        states_of = self._tail(place, width, start)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, chunk in enumerate(current.chunks):
            alike.setdefault(self._stops(chunk), []).append(number)
        found = None
        for stops, numbers in alike.items():
            chunks = [current.chunks[number] for number in numbers]
            rows = upload(current.rows(numbers).view(len(chunks), -1), self.device)
            kept = [states_of[self._slot(chunk, chunk.start - 1)] if chunk.start > 0 else start for chunk in chunks]
            states, begin = torch.stack(kept), 0
            for stop in stops:
                columns = rows[:, begin:stop]
                out, states = recurrence(states, *(x[columns, 0] for x in inputs))
                for chunk, state in zip(chunks, states, strict=True):
                    states_of[self._slot(chunk, chunk.start + stop - 1)] = state
                found = out.new_empty(len(current.positions), 1, *out.shape[2:]) if found is None else found
                found[columns, 0] = out
                begin = stop
        assert found is not None
        return found

    def _stops(self, chunk: Chunk) -> tuple[int, ...]:
        """The numbers of tokens of a chunk after which its state is stored; the last one is all."""
        size, stops = self.block_size, list[int]()
        for index in range(chunk.start // size, -(-chunk.end // size)):
            if chunk.table.blocks[-1][index] is not None:
                end = min(chunk.end, (index + 1) * size)
                first = max(chunk.start, index * size, end - self._state_width)
                stops += range(first + 1 - chunk.start, end + 1 - chunk.start)
        return tuple(stops)

    def _slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        """The block and column of the state after the token at `position`."""
        block = chunk.table.blocks[-1][position // self.block_size]
        assert block is not None
        return block, position % self._state_width

    def _tail(self, place: str, width: int, entry: Tensor) -> Tensor:
        """The stored entries (blocks, width, ...) of `place`, at first 0; each is like `entry` (...)."""
        if place not in self._tails:
            shape = (self._num_blocks[-1] + 1, width, *entry.shape)
            self._tails[place] = zeros(shape, entry.dtype, self.device)
        return self._tails[place]

    def prepare(self, window: int | None, kind: Callable[[], AttentionKind]) -> Attending:
        """Prepares the attention of the pass in the layers with this window."""
        number = self._kind_of_window[window]
        if self.static is None:
            return PagedAttending.of_pass(kind(), self._current, number, native=self.is_native)
        if number not in self.static.attending:
            metadata = self.static.metadata[number]
            self.static.attending[number] = PagedAttending.of_static(kind(), metadata)
        return self.static.attending[number]

    def metadata(self, attending: Attending | None) -> AttentionMetadata | None:
        """The metadata of all tokens of the pass, if a paged kernel attends for all of them."""
        return attending.metadata if isinstance(attending, PagedAttending) else None

    def attend_latents(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_B1TR: Tensor, c_B1TL: Tensor, attend: AttendLatents
    ) -> Tensor:
        """Stores the new shared keys and latents of a layer and attends as `attend` does."""
        return self.attend(layer, attending, q_BHTC, k_B1TR, c_B1TL, PLAIN, attend)

    def attend(
        self,
        layer: int,
        attending: Attending,
        q_BHTC: Tensor,
        k_BKTC: Tensor,
        v_BKTC: Tensor,
        score: Score,
        attend_latents: AttendLatents | None = None,
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends, each token to its own sequence up to itself."""
        assert isinstance(attending, PagedAttending)
        keys, values = self.keys[layer], self.values[layer]
        k_NK1C = keys.store(attending.slot_mapping, k_BKTC[:, :, 0])[:, :, None]
        v_NK1C = values.store(attending.slot_mapping, v_BKTC[:, :, 0])[:, :, None]
        return attending.attend_blocks(keys, values, q_BHTC, k_NK1C, v_NK1C, score, attend_latents)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The encoder's keys and values for a layer, which `project` computes once, and again for a new source."""
        if layer not in self._memory:
            self._memory[layer] = project()
        return self._memory[layer]
