"""Runs the network on the contexts of several requests: incrementally with a cache, or whole each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sheepop.model import EncoderDecoder, KeyValueCache, Memory, Transformer

_PADDING_ID = 0  # any valid row of the embedding will do: nothing attends to it


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
        self.model, self.device = model, model.embedding.weight.device
        self._memory: Memory | None = None
        if isinstance(model, EncoderDecoder):
            assert sources is not None
            source_ids, padding = _padded(sources, behind=True)
            mask = torch.arange(source_ids.shape[1]) < (source_ids.shape[1] - padding)[:, None]
            self._memory = model.encode(source_ids.to(self.device), mask.to(self.device))

    def logits(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """The logits (B, V) behind the last token of each row."""
        if self._memory is not None:
            inputs["memory"] = self._memory
        hidden_BTD = self.model.hidden_states(input_ids.to(self.device), **inputs)
        return self.model.read_out(hidden_BTD, logits_to_keep=1)[:, -1]

    def keep_rows(self, rows: Tensor) -> None:
        """Chooses among the sources."""
        if self._memory is not None:
            self._memory = self._memory.rows(rows)


class IncrementalRunner:
    """Keeps keys and values, so that a step runs the network on one position per row."""

    def __init__(self, model: Transformer, sources: Sequence[Sequence[int]] | None = None) -> None:
        self._network = SourcedNetwork(model, sources)
        self._cache: KeyValueCache | None = None
        self._lengths = torch.empty(0, dtype=torch.long)

    def start(self, contexts: Sequence[Sequence[int]], num_new_tokens: Sequence[int]) -> Tensor:
        """Fills a new cache with the contexts, left-padded to the longest."""
        self._cache = None  # the old cache's memory is free before the new one is allocated
        model, device = self._network.model, self._network.device
        input_ids, padding = pad_left(contexts)
        max_seq_len, longest = model.config.max_seq_len, input_ids.shape[1]
        # A short row may go on after the longest has ended, behind slots that are padding in its own row.
        capacity = max(
            longest - len(context) + min(len(context) + count - 1, max_seq_len)
            for context, count in zip(contexts, num_new_tokens, strict=True)
        )
        self._cache = KeyValueCache(
            model.config,
            len(contexts),
            capacity,
            device=device,
            dtype=model.embedding.weight.dtype,
            padding=padding,
        )
        self._lengths = (longest - padding).to(device)
        positions = _positions(longest, padding)
        return self._network.logits(
            input_ids, positions=None if positions is None else positions.to(device), cache=self._cache
        )

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Runs the network on the new tokens alone."""
        input_ids = torch.tensor(token_ids, device=self._lengths.device)[:, None]
        logits = self._network.logits(input_ids, positions=self._lengths[:, None], cache=self._cache)
        self._lengths = self._lengths + 1
        return logits

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Chooses among the rows' keys and values."""
        assert self._cache is not None
        indices = torch.tensor(rows, device=self._lengths.device)
        self._cache.keep_rows(indices)
        self._network.keep_rows(indices)
        self._lengths = self._lengths[indices]


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
        self._network.keep_rows(torch.tensor(rows, device=self._network.device))

    def _logits(self) -> Tensor:
        device = self._network.device
        input_ids, padding = pad_left(self._contexts)
        length = input_ids.shape[1]
        positions = _positions(length, padding)
        if positions is None:
            return self._network.logits(input_ids)
        # Padding is a document of its own, which no token of the text attends to.
        is_text = (torch.arange(length) >= padding[:, None]).long()
        return self._network.logits(input_ids, positions=positions.to(device), document_ids=is_text.to(device))


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) that all end in the last column, and the number of padding slots of each row (B,)."""
    return _padded(rows, behind=False)


def _padded(rows: Sequence[Sequence[int]], *, behind: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    fill = [[_PADDING_ID] * count for count in padding]
    input_ids = [[*row, *more] if behind else [*more, *row] for row, more in zip(rows, fill, strict=True)]
    return torch.tensor(input_ids), torch.tensor(padding)


def _positions(length: int, padding: Tensor) -> Tensor | None:
    """Positions (B, T) that are 0 at the first token behind the padding; None when there is no padding."""
    if not padding.any():
        return None
    return (torch.arange(length) - padding[:, None]).clamp(min=0)
