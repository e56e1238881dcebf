"""Passes that read one token of each text, recorded once for a number of texts and replayed as one CUDA graph.

A GPU is done with such a pass sooner than Python can ask for its kernels one by one. A recording reads the memory that
it was made with, so what a pass reads is copied there; texts that are missing up to its number read and write a block
of the cache that belongs to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sheepop.generate.blocks import Chunk
from sheepop.generate.paged_attention import Pass, StandingPass
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.triton_attention import attends_by_triton
from sheepop.model import Transformer
from sheepop.model.probe import someone_watches

Record = Callable[[Callable[[], None]], Callable[[], Any]]
"""Runs some work on a device a few times, and returns what does it again."""

_MOST_TEXTS = 256
_PASSES_BEFORE = 8  # a recording costs as much as several passes


class DecodingGraphs:
    """Recordings by their number of texts, a power of two; each is made when such passes are seen to come again."""

    def __init__(self, model: Transformer, cache: PagedCache, record: Record) -> None:
        self._model, self._cache, self._record = model, cache, record
        self._seen: Counter[int] = Counter()
        self._recordings: dict[int, tuple[StandingPass, Tensor, Callable[[], Any]]] = {}

    @classmethod
    def of(cls, model: Transformer, cache: PagedCache) -> DecodingGraphs | None:
        """Those of a network on a GPU; None where a pass asks the host for something, or the GPU lacks a kernel."""
        config = model.config
        asks = config.experts is not None or config.ngrams is not None or config.short_convolution is not None
        if config.architecture != "decoder" or asks or not attends_by_triton(model.attention_kind(cached=True)):
            return None
        return cls(model, cache, _recorder())

    def suits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether there is or should be a recording for a pass."""
        if len(chunks) > _MOST_TEXTS or any(chunk.count != 1 for chunk in chunks) or someone_watches():
            return False
        size = _size(len(chunks))
        self._seen[size] += 1
        return self._seen[size] > _PASSES_BEFORE

    def run(self, token_ids: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        """The logits (R, V) behind one token of each text."""
        now, size = Pass(chunks, self._cache.block_size, self._cache.device), _size(len(chunks))
        if size not in self._recordings:
            self._recordings[size] = self._recorded(size, token_ids, now)
        standing, logits, replay = self._recordings[size]
        standing.fill(token_ids, now)
        replay()
        return logits[: len(chunks)].clone()

    def _recorded(
        self, size: int, token_ids: Sequence[int], now: Pass
    ) -> tuple[StandingPass, Tensor, Callable[[], Any]]:
        model, cache = self._model, self._cache
        standing = cache.standing_pass(size, model.config.max_seq_len)
        standing.fill(token_ids, now)
        logits = torch.empty(size, model.config.vocabulary, dtype=model.dtype, device=cache.device)

        def work() -> None:
            cache.read_again(standing)
            logits.copy_(model.read_out(model.hidden_states(standing.input_ids, cache=cache))[:, 0])

        return standing, logits, self._record(work)


def _size(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _recorder() -> Record:
    """Records on the present GPU; all recordings share one pool of memory, since they never run at once."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], Any]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what is compiled or allocated at first use must not be recorded
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return record
