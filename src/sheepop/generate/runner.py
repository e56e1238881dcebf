"""Runs the network on the contexts of several requests: incrementally with a cache, or whole each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sheepop.model import EncoderDecoder, KeyValueCache, Memory, Transformer

_PADDING_ID = 0  # any valid row of the embedding will do: no token attends to it


class Runner(Protocol):
    """Next-token logits (B, V) of B rows of tokens."""

    def start(self, contexts: Sequence[Sequence[int]], num_new_tokens: Sequence[int]) -> Tensor:
        """Reads whole contexts; row b will be given at most ``num_new_tokens[b] - 1`` tokens more."""

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Reads one more token in every row."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows, in this order; one that is named twice becomes two."""


class SourcedNetwork:
    """A network whose rows each have a source, where it has an encoder; the sources are read once."""

    def __init__(self, model: Transformer, sources: Sequence[Sequence[int]] | None) -> None:
        self.model, self.device = model, model.device
        self._memory: Memory | None = None
        if isinstance(model, EncoderDecoder):
            assert sources is not None
            lengths = torch.tensor([len(source) for source in sources])[:, None]
            source_ids = pad(sources)
            mask = torch.arange(source_ids.shape[1]) < lengths
            self._memory = model.encode(source_ids.to(self.device), mask.to(self.device))

    def logits(self, input_ids: Tensor, lengths: Sequence[int], **inputs: Any) -> Tensor:
        """The logits (B, V) behind the last token of each row; row b has `lengths[b]` of them."""
        if self._memory is not None:
            inputs["memory"] = self._memory
        hidden_BTD = self.model.hidden_states(input_ids.to(self.device), **inputs)
        if min(lengths) < hidden_BTD.shape[1]:
            last = torch.tensor(lengths, device=self.device) - 1
            hidden_BTD = hidden_BTD[torch.arange(len(lengths), device=self.device), last][:, None]
        return self.model.read_out(hidden_BTD, logits_to_keep=1)[:, -1]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Chooses among the sources."""
        if self._memory is not None:
            self._memory = self._memory.rows(torch.tensor(rows, device=self.device))


class IncrementalRunner:
    """Keeps keys and values, so that a step runs the network on one position per row."""

    def __init__(self, model: Transformer, sources: Sequence[Sequence[int]] | None = None) -> None:
        self._network = SourcedNetwork(model, sources)
        self._cache: KeyValueCache | None = None

    def start(self, contexts: Sequence[Sequence[int]], num_new_tokens: Sequence[int]) -> Tensor:
        """Fills a new cache with the contexts, padded behind to the longest."""
        self._cache = None  # the old cache's memory is free before the new one is allocated
        model, counts = self._network.model, [len(context) for context in contexts]
        needed = max(count + new - 1 for count, new in zip(counts, num_new_tokens, strict=True))
        self._cache = KeyValueCache(
            model.config,
            len(contexts),
            min(needed, model.config.max_seq_len),
            device=model.device,
            dtype=model.dtype,
        )
        return self._network.logits(pad(contexts), counts, counts=counts, cache=self._cache)

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Runs the network on the new tokens alone."""
        return self._network.logits(torch.tensor(token_ids)[:, None], [1] * len(token_ids), cache=self._cache)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Chooses among the rows' keys and values."""
        assert self._cache is not None
        self._cache.keep_rows(rows)
        self._network.keep_rows(rows)


class RecomputingRunner:
    """Runs the network on the whole of every context for every token: slow, and the measure of the other one."""

    def __init__(self, model: Transformer, sources: Sequence[Sequence[int]] | None = None) -> None:
        self._network = SourcedNetwork(model, sources)
        self._contexts: list[list[int]] = []

    def start(self, contexts: Sequence[Sequence[int]], num_new_tokens: Sequence[int]) -> Tensor:
        """Remembers the contexts and runs them."""
        self._contexts = [list(context) for context in contexts]
        return self._logits()

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Runs all tokens again, with the new ones."""
        for context, token_id in zip(self._contexts, token_ids, strict=True):
            context.append(token_id)
        return self._logits()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Chooses among the contexts."""
        self._contexts = [list(self._contexts[row]) for row in rows]
        self._network.keep_rows(rows)

    def _logits(self) -> Tensor:
        input_ids, lengths = pad(self._contexts), [len(context) for context in self._contexts]
        # Padding shares the position of the last token before it, so that nothing beyond a row's end is looked up.
        positions = torch.arange(input_ids.shape[1]).minimum(torch.tensor(lengths)[:, None] - 1)
        even = min(lengths) == max(lengths)
        return self._network.logits(input_ids, lengths, positions=None if even else positions.to(self._network.device))


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids (B, T) that all begin in the first column; what stands behind a row is seen by none of its tokens."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[_PADDING_ID] * (longest - len(row))] for row in rows])
