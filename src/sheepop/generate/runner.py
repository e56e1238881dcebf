"""Runs the network on the tokens of a step, with the paged cache."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from sheepop.adapt.row_adapters import Adapter, RowAdapters
from sheepop.core.errors import UsageError
from sheepop.core.native import say_once
from sheepop.generate.blocks import BlockManager, Chunk, Copy
from sheepop.generate.paged_attention import StaticPass
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.paged_kernels import attends_by_triton, attends_natively
from sheepop.generate.scheduler import Grant
from sheepop.generate.transfers import upload, with_sampled
from sheepop.model import EncoderDecoder, Memory, Transformer
from sheepop.model.probe import someone_watches

Capture = Callable[[Callable[[], None]], Callable[[], Any]]
"""Captures the work of a function on a device; returns a function that replays it."""

_Source = tuple[Adapter | None, Sequence[int] | None]
"""The tokens that the encoder reads for a text, with the text's adapter."""

_PADDING_ID = 0  # any valid row of the embedding will do: no token attends to it
_MOST_CAPTURED, _SIZES_APART = 256, 16
_PASSES_BEFORE_CAPTURE = 2  # a capture costs as much as several passes
_CAPTURING: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by device; it captures one at a time


@dataclass(frozen=True)
class Reading:
    """The input of a pass: blocks to copy first, chunks, their `token_ids`, and the rows to compute logits for.

    A negative token id -1 - r stands for number r of the tokens of the last step, which only the device knows so far.
    `adapters` has the adapter of each row, or nothing if none has one; `sources` likewise what the encoder reads for
    each chunk.
    """

    copies: Sequence[Copy]
    chunks: Sequence[Chunk]
    token_ids: Sequence[int]
    predicting: Sequence[int]
    adapters: Sequence[Adapter | None] = ()
    sources: Sequence[_Source] = ()

    @classmethod
    def of(cls, grants: Sequence[Grant]) -> Reading:
        """Returns the input of a pass that reads the chunks of `grants`."""
        read: list[int] = []
        predicting: list[int] = []
        for reader, (_, start, count), num_predictions, _ in grants:
            context = reader.context
            read += context[start : start + count]
            if start + count > len(context):
                read += reader.drafts[max(0, start - len(context)) : start + count - len(context)]
            predicting += range(len(read) - num_predictions, len(read))
        adapters, sources = list[Adapter | None](), list[_Source]()
        if any(grant.reader.adapter is not None for grant in grants):
            adapters = [grant.reader.adapter for grant in grants for _ in range(grant.chunk.count)]
        if any(grant.reader.source_ids is not None for grant in grants):
            sources = [(grant.reader.adapter, grant.reader.source_ids) for grant in grants]
        copies = [copy for grant in grants for copy in grant.copies]
        return cls(copies, [grant.chunk for grant in grants], read, predicting, adapters, sources)


class PagedRunner:
    """Reads every token once; keys and values stay in the blocks of `cache`."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._graphs = DecodingGraphs.of(model, cache) or StaticPasses.of(model, cache)
        self._sources = _Sources(self._network_for) if isinstance(model, EncoderDecoder) else None

    def require(self, adapter: Adapter) -> None:
        """Raises `UsageError` if texts with this adapter cannot be read."""
        if self._cache.batch_invariant:
            raise UsageError(
                "batch_invariant does not work with adapters, because their matrix products depend on the other rows. "
                "Leave it out, or merge the adapter into the model."
            )
        if is_led(self._model):
            raise UsageError("A model that is split over several processes takes no adapters. Serve it in one.")
        self._adapted.require(adapter)
        say_once(
            "Passes that read texts with adapters run without CUDA graphs, and with DoRA also without the native block."
        )

    def prepare(self, most: int) -> None:
        """Captures passes of up to `most` texts where they can be captured, so that no request waits for that."""
        if isinstance(self._graphs, DecodingGraphs):
            self._graphs.prepare(most)

    def run(self, grants: Sequence[Grant], sampled: Tensor | None = None) -> Tensor:
        """Reads the new tokens, each as its own row; returns the logits (R, V) after each text and each guess.

        `sampled` are the tokens of the last step on the device; see `Reading`.
        """
        return self.read(Reading.of(grants), sampled)

    def read(self, reading: Reading, sampled: Tensor | None = None) -> Tensor:
        """The logits of one pass."""
        self._prepare(reading)
        is_plain = len(reading.predicting) == len(reading.token_ids) and not reading.adapters
        if self._graphs is not None and is_plain and self._graphs.suits(reading.chunks):
            return self._graphs.run(reading.token_ids, reading.chunks, sampled)
        return self._model.read_out(self._states(reading, sampled)[:, None])[:, 0]

    def states(self, reading: Reading) -> Tensor:
        """Returns the hidden states (R, D) of one pass, from which `read` computes logits."""
        self._prepare(reading)
        return self._states(reading)

    def _prepare(self, reading: Reading) -> None:
        """Makes the blocks of a pass."""
        if self._cache.make_room(reading.chunks, reading.copies) and self._graphs is not None:
            self._graphs.drop()
        self._cache.copy(reading.copies)

    def _states(self, reading: Reading, sampled: Tensor | None = None) -> Tensor:
        chunks, read, predicting = reading.chunks, reading.token_ids, reading.predicting
        inputs: dict[str, Any] = {}
        numbers, longest = None, 0
        if self._sources is not None:
            inputs["memory"], numbers = self._sources.memory(reading.sources, [chunk.count for chunk in chunks])
            longest = inputs["memory"].states.shape[1]
        self._cache.read(chunks, numbers, longest)
        device = self._model.device
        input_ids = with_sampled(upload(torch.tensor(read), device), sampled)[:, None]
        hidden_N1D = self._network_for(reading.adapters).hidden_states(input_ids, cache=self._cache, **inputs)
        if len(predicting) < len(read):
            hidden_N1D = hidden_N1D[upload(torch.tensor(predicting, dtype=torch.long), device)]
        return hidden_N1D[:, 0]

    def _network_for(self, adapters: Sequence[Adapter | None]) -> Transformer:
        """The network for a pass whose rows have these adapters: a slower copy of the model if some row has one."""
        return self._adapted.select(adapters) if any(each is not None for each in adapters) else self._model

    @cached_property
    def _adapted(self) -> RowAdapters:
        return RowAdapters(self._model)


def is_led(model: Transformer) -> bool:
    """Whether `model` is split over this process and followers; `split_model.Followers` gives such a model `led`."""
    return hasattr(model, "led")


def paged_runner(model: Transformer, manager: BlockManager, **settings: Any) -> PagedRunner:
    """Returns the runner of `model` with a new cache of the blocks of `manager`, in all processes if it is split.

    `settings` are further ones of `PagedCache`.
    """
    settings |= {"num_blocks": list(manager.num_blocks), "block_size": manager.block_size}
    cache = PagedCache(model, **settings)
    # The leader makes its runner, because an import of it would load tensor parallelism and torch's compiler.
    return cast(Any, model.led).runner(model, cache, settings) if is_led(model) else PagedRunner(model, cache)


def hidden_states(model: Transformer, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the hidden states (T, D) of each text, computed together without a cache.

    If the model is split, all processes compute them, of one text at a time.
    """
    if is_led(model):
        (token_ids,) = texts
        with cast(Any, model.led).whole(token_ids):
            return [model.hidden_states(torch.tensor([list(token_ids)], device=model.device))[0]]
    longest = max(map(len, texts))
    input_ids = torch.tensor([[*text, *[_PADDING_ID] * (longest - len(text))] for text in texts], device=model.device)
    found = model.hidden_states(input_ids)
    return [found[row, : len(text)] for row, text in enumerate(texts)]


def length_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yields the places of texts of these lengths in batches, the longest texts first.

    A batch, padded to its longest text, has at most `most` tokens, or is one text.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        count = max(1, most // max(1, lengths[order[-1]]))
        yield order[-count:]
        del order[-count:]


class _Sources:
    """The encoder's states for the sources of the running requests; each source is encoded once with an adapter."""

    def __init__(self, network_for: Callable[[Sequence[Adapter | None]], Transformer]) -> None:
        self._network_for = network_for
        self._known: dict[tuple[Adapter | None, tuple[int, ...]], tuple[int, Tensor]] = {}
        self._numbers = itertools.count()

    def memory(self, sources: Sequence[_Source], counts: Sequence[int]) -> tuple[Memory, list[int]]:
        """The states for the tokens of a pass, `counts` of them for each source, and the numbers of the sources."""
        keys = [(adapter, tuple(source or ())) for adapter, source in sources]
        for key in dict.fromkeys(keys):
            if key not in self._known:
                model = cast(EncoderDecoder, self._network_for([key[0]]))
                encoded = model.encode(torch.tensor([key[1]], device=model.device))
                self._known[key] = next(self._numbers), encoded.states[0]
        for key in self._known.keys() - set(keys):
            del self._known[key]
        states = torch.nn.utils.rnn.pad_sequence([self._known[key][1] for key in keys], batch_first=True)
        device = states.device
        lengths = upload(torch.tensor([len(key) for _, key in keys]), device)
        mask = torch.arange(states.shape[1], device=device) < lengths[:, None]
        rows = upload(torch.arange(len(keys)).repeat_interleave(torch.tensor(counts)), device)
        return Memory(states[rows], mask[rows]), [self._known[key][0] for key in keys]


class DecodingGraphs:
    """CUDA graphs of passes that read one token of each text, one graph for each of the sizes of `_size`.

    A GPU finishes such a pass sooner than Python can launch its kernels one by one. A graph reads the static buffers
    that it was captured with, so the input of a pass is copied there; padding tokens read and write a block of the
    cache that belongs to no text. A graph is captured by `prepare` or after several passes of its size, and again once
    the cache has grown. `begin` prepares captures that are dropped together.
    """

    def __init__(self, model: Transformer, cache: PagedCache, begin: Callable[[], Capture]) -> None:
        self._model, self._cache, self._begin, self._capture = model, cache, begin, begin()
        self._seen: Counter[int] = Counter()
        self._captured: dict[int, tuple[StaticPass, Tensor, Callable[[], Any]]] = {}

    @classmethod
    def of(cls, model: Transformer, cache: PagedCache) -> DecodingGraphs | None:
        """The graphs of a network on a GPU; None if a pass needs the host, or the GPU has no paged kernel."""
        fits = _has_plain_passes(model) and model.config.experts is None
        fits = fits and attends_by_triton(model.attention_kind(cached=True))
        return cls(model, cache, _cuda_capture) if fits else None

    def drop(self) -> None:
        """Drops all graphs, because the memory that they read is another now."""
        self._captured.clear()
        self._capture = self._begin()

    def prepare(self, most: int) -> None:
        """Captures the graphs for up to `most` texts."""
        for size in sorted({_size(count) for count in range(1, min(most, _MOST_CAPTURED) + 1)} - self._captured.keys()):
            self._seen[size] = _PASSES_BEFORE_CAPTURE
            self._captured[size] = self._capture_pass(size)

    def suits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a pass should be run by a graph, captured now if there is none; counts the pass."""
        if len(chunks) > _MOST_CAPTURED or not _reads_one_each(chunks):
            return False
        size = _size(len(chunks))
        self._seen[size] += 1
        return self._seen[size] > _PASSES_BEFORE_CAPTURE

    def run(self, token_ids: Sequence[int], chunks: Sequence[Chunk], sampled: Tensor | None = None) -> Tensor:
        """Returns the logits (R, V) after one token of each text."""
        size = _size(len(chunks))
        if size not in self._captured:
            self._captured[size] = self._capture_pass(size)
        static, logits, replay = self._captured[size]
        static.fill(token_ids, chunks)
        if sampled is not None:
            static.input_ids.copy_(with_sampled(static.input_ids, sampled))
        replay()
        return logits[: len(chunks)].clone()

    def _capture_pass(self, size: int) -> tuple[StaticPass, Tensor, Callable[[], Any]]:
        model, cache = self._model, self._cache
        static = cache.static_pass(size, model.config.max_seq_len)
        static.fill([], [])  # the capture writes to spare blocks alone
        logits = torch.empty(size, model.config.vocabulary, dtype=model.dtype, device=cache.device)

        def work() -> None:
            cache.static = static
            logits.copy_(model.read_out(model.hidden_states(static.input_ids, cache=cache))[:, 0])

        return static, logits, self._capture(work)


class StaticPasses:
    """Passes on a CPU that read one token of each text from static buffers, which native code is told of only once."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._static: StaticPass | None = None

    @classmethod
    def of(cls, model: Transformer, cache: PagedCache) -> StaticPasses | None:
        """Returns the passes of a network; None if the native kernel does not compute attention in all layers."""
        is_plain = _has_plain_passes(model) and cache.is_native
        kinds = (model.attention_kind(window, cached=True) for window in set(model.windows))
        return cls(model, cache) if is_plain and all(map(attends_natively, kinds)) else None

    def drop(self) -> None:
        """Drops the buffers, because the cache has other memory now."""
        self._static = None

    def suits(self, chunks: Sequence[Chunk]) -> bool:
        """Returns whether each text of a pass reads one token."""
        return _reads_one_each(chunks)

    def run(self, token_ids: Sequence[int], chunks: Sequence[Chunk], sampled: Tensor | None = None) -> Tensor:
        """Returns the logits (R, V) after one token of each text."""
        model, cache = self._model, self._cache
        if self._static is None or self._static.count != len(chunks):
            self._static = cache.static_pass(len(chunks), model.config.max_seq_len)
        self._static.fill(token_ids, chunks)
        cache.static, input_ids = self._static, with_sampled(self._static.input_ids, sampled)
        return model.read_out(model.hidden_states(input_ids, cache=cache))[:, 0]


def _reads_one_each(chunks: Sequence[Chunk]) -> bool:
    return all(chunk.count == 1 for chunk in chunks) and not someone_watches()


def _has_plain_passes(model: Transformer) -> bool:
    """Whether a pass needs no more of the host than the tokens and where they are stored."""
    sections = ("ngrams", "short_convolution", "gated_convolution", "gated_delta_net")
    return model.config.architecture == "decoder" and all(getattr(model.config, name) is None for name in sections)


def _size(count: int) -> int:
    """The tokens of the graph for `count` texts: a power of two up to 16, then a multiple of 16."""
    return 1 << (count - 1).bit_length() if count <= _SIZES_APART else -(-count // _SIZES_APART) * _SIZES_APART


def _cuda_capture() -> Capture:
    """Captures on the current GPU; all graphs share one memory pool, since no two run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], Any]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compilation and allocation at first use must not be captured
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, of other models or of embeddings, use the same GPU meanwhile.
        with (
            _CAPTURING[torch.cuda.current_device()],
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay

    return capture
