"""Runs the network on what a step reads: with a cache, or on whole texts each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sheepop.generate.blocks import Chunk, Copy
from sheepop.generate.decoding_graphs import DecodingGraphs
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.scheduler import Share
from sheepop.model import EncoderDecoder, Memory, Transformer

_PADDING_ID = 0  # any valid row of the embedding will do: no token attends to it


class Runner(Protocol):
    """The network as the engine sees it."""

    def run(self, shares: Sequence[Share]) -> Tensor:
        """Reads what is granted; the logits (R, V) behind each text and each of its guesses that was read."""


@dataclass(frozen=True)
class Reading:
    """What a pass reads: tokens by chunks, behind which of them logits are wanted, and blocks to copy before."""

    copies: Sequence[Copy]
    chunks: Sequence[Chunk]
    token_ids: Sequence[int]
    predicting: Sequence[int]

    @classmethod
    def of(cls, shares: Sequence[Share]) -> Reading:
        """What is granted."""
        grants = [grant for share in shares for grant in share.grants]
        read: list[int] = []
        predicting: list[int] = []
        for grant in grants:
            reader, chunk = grant
            read += (reader.context + reader.drafts)[chunk.start : chunk.end]
            predicting += range(len(read) - grant.num_predictions, len(read))
        return cls(
            [copy for share in shares for copy in share.copies], [grant.chunk for grant in grants], read, predicting
        )


class PagedRunner:
    """Reads every token once; keys and values stay in the blocks of `cache`."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._graphs = DecodingGraphs.of(model, cache)
        self._sources = _Sources(model) if isinstance(model, EncoderDecoder) else None

    def run(self, shares: Sequence[Share]) -> Tensor:
        """Reads the new tokens, each as a row of its own."""
        sources = None
        if self._sources is not None:
            sources = [share.request.source_ids for share in shares for _ in share.grants]
        return self.read(Reading.of(shares), sources)

    def read(self, reading: Reading, sources: Sequence[Sequence[int] | None] | None = None) -> Tensor:
        """The logits of one pass; `sources` are what the encoder reads for each chunk."""
        chunks, read, predicting = reading.chunks, reading.token_ids, reading.predicting
        self._cache.copy(reading.copies)
        if self._graphs is not None and self._graphs.suits(chunks):
            return self._graphs.run(read, chunks)
        inputs: dict[str, Any] = {}
        numbers, longest = None, 0
        if self._sources is not None and sources is not None:
            inputs["memory"], numbers = self._sources.memory(sources, [chunk.count for chunk in chunks])
            longest = inputs["memory"].states.shape[1]
        self._cache.read(chunks, numbers, longest)
        device = self._model.device
        input_ids = torch.tensor(read, device=device)[:, None]
        hidden_N1D = self._model.hidden_states(input_ids, cache=self._cache, **inputs)
        if len(predicting) < len(read):
            hidden_N1D = hidden_N1D[torch.tensor(predicting, dtype=torch.long, device=device)]
        return self._model.read_out(hidden_N1D)[:, 0]


class RecomputingRunner:
    """Runs the network on the whole of every text for every token: slow, and the measure of the other one."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._sources = _Sources(model) if isinstance(model, EncoderDecoder) else None

    def run(self, shares: Sequence[Share]) -> Tensor:
        """Reads all of the texts that a token is chosen for."""
        grants = [(share, grant) for share in shares for grant in share.grants if grant.num_predictions]
        device = self._model.device
        if not grants:
            return torch.empty(0, self._model.config.vocabulary, device=device)
        texts = [[*grant.reader.context, *grant.reader.drafts][: grant.chunk.end] for _, grant in grants]
        longest = max(map(len, texts))
        input_ids = torch.tensor([[*text, *[_PADDING_ID] * (longest - len(text))] for text in texts], device=device)
        lengths = torch.tensor(list(map(len, texts)), device=device)[:, None]
        # Padding shares the position of the last token before it, so that nothing beyond a row's end is looked up.
        inputs: dict[str, Any] = {"positions": torch.arange(longest, device=device).minimum(lengths - 1)}
        if self._sources is not None:
            sources = [share.request.source_ids for share, _ in grants]
            inputs["memory"], _ = self._sources.memory(sources, [1] * len(grants))
        hidden_BTD = self._model.hidden_states(input_ids, **inputs)
        parts = [
            hidden_BTD[row, len(text) - grant.num_predictions : len(text)]
            for row, (text, (_, grant)) in enumerate(zip(texts, grants, strict=True))
        ]
        return self._model.read_out(torch.cat(parts)[:, None])[:, 0]


class _Sources:
    """What the encoder made of the sources of the requests that run, each read once."""

    def __init__(self, model: EncoderDecoder) -> None:
        self._model = model
        self._numbers: dict[tuple[int, ...], int] = {}
        self._states: dict[int, Tensor] = {}
        self._next = 0

    def memory(self, sources: Sequence[Sequence[int] | None], counts: Sequence[int]) -> tuple[Memory, list[int]]:
        """The states for the tokens of a pass, `counts` of them for each source, and the numbers of the sources."""
        keys = [tuple(source or ()) for source in sources]
        for key in dict.fromkeys(keys):
            if key not in self._numbers:
                self._numbers[key] = self._next
                source_ids = torch.tensor([key], device=self._model.device)
                self._states[self._next] = self._model.encode(source_ids).states[0]
                self._next += 1
        for key in self._numbers.keys() - set(keys):
            del self._states[self._numbers.pop(key)]
        numbers = [self._numbers[key] for key in keys]
        device = self._model.device
        lengths = torch.tensor([len(key) for key in keys], device=device)
        states = torch.nn.utils.rnn.pad_sequence([self._states[number] for number in numbers], batch_first=True)
        mask = torch.arange(states.shape[1], device=device) < lengths[:, None]
        rows = torch.arange(len(keys), device=device).repeat_interleave(torch.tensor(counts, device=device))
        return Memory(states[rows], mask[rows]), numbers
