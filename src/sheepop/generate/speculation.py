"""Speculative decoding: guesses of the next tokens, which the network checks in one pass (Leviathan et al. 2023).

A sampled token depends only on the logits, the request's seed and its position. So a token is sampled after each guess,
and guesses are accepted up to the first that differs: the text is the same as without guesses. Good guesses save
passes, bad ones cost a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from sheepop.adapt.row_adapters import Adapter
from sheepop.generate.blocks import BlockManager, BlockTable, Copy
from sheepop.generate.request import Candidate
from sheepop.generate.runner import PagedRunner
from sheepop.generate.sampler import Row, Sampler
from sheepop.generate.scheduler import Grant, Share


class Drafter(Protocol):
    """A source of guesses."""

    count: int
    """The most guesses for a text."""

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Returns the guesses for each text, at most its `num_guessable`, possibly none."""

    def forget(self, candidate: Candidate) -> None:
        """Drops the state of a text that has ended."""

    def reset(self) -> None:
        """Drops the state of all texts."""


class LookupDrafter:
    """Guesses the tokens that followed the last n tokens where these occurred before (Saxena 2023, prompt lookup).

    It tries n from `longest` down to `shortest`.
    """

    def __init__(self, count: int, *, longest: int = 3, shortest: int = 2) -> None:
        self.count = count
        self._sizes = range(longest, shortest - 1, -1)
        self._indexes: dict[int, _Index] = {}

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Looks the guesses up in prompt and text."""
        found = []
        for candidate in candidates:
            index = self._indexes.setdefault(id(candidate), _Index(self._sizes))
            index.read([*candidate.request.prompt.token_ids, *candidate.token_ids])
            found.append(index.follows(min(self.count, candidate.num_guessable)))
        return found

    def forget(self, candidate: Candidate) -> None:
        """Drops the index of a text."""
        self._indexes.pop(id(candidate), None)

    def reset(self) -> None:
        """Drops all indexes."""
        self._indexes.clear()


class _Index:
    """The last position at which each n-gram ended, before the end of the text."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Reads the new tokens; an n-gram is indexed once a token follows it."""
        for end in range(len(self._tokens), len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._tokens = tokens

    def follows(self, count: int) -> list[int]:
        """The up to `count` tokens that followed the longest final n-gram that occurred before."""
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                return self._tokens[end : end + count]
        return []


class ModelDrafter:
    """Guesses with a smaller model of the same vocabulary, which samples with the same seeds and so often agrees."""

    def __init__(self, runner: PagedRunner, sampler: Sampler, manager: BlockManager, count: int) -> None:
        self.count = count
        self._runner, self._sampler, self._manager = runner, sampler, manager
        self._readers: dict[int, _DraftReader] = {}

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Generates guesses with the smaller model; a text without free blocks gets no more guesses."""
        readers = [self._reader(candidate) for candidate in candidates]
        open_ones = readers
        for _ in range(self.count):
            open_ones = [reader for reader in open_ones if reader.is_open and self._reserve(reader)]
            if not open_ones:
                break
            shares = [reader.share() for reader in open_ones]
            logits = self._runner.run(shares)
            ends = accumulate(share.grants[0].num_predictions for share in shares)
            logits = logits[torch.tensor([end - 1 for end in ends], device=logits.device)]
            chosen = self._sampler.choose(logits, [reader.row() for reader in open_ones])
            for reader, token_id in zip(open_ones, chosen.token_ids, strict=True):
                self._manager.advance(reader.grant.chunk.table, reader.context, len(reader.context))
                reader.drafts.append(token_id)
        return [reader.drafts for reader in readers]

    def forget(self, candidate: Candidate) -> None:
        """Frees the blocks of a text."""
        reader = self._readers.pop(id(candidate), None)
        if reader is not None and reader.table is not None:
            self._manager.close(reader.table)

    def reset(self) -> None:
        """Frees all blocks, and forgets what they hold."""
        self._readers.clear()
        self._manager.forget()

    def _reader(self, candidate: Candidate) -> _DraftReader:
        """The smaller model's reader of a text; it starts again if the text has lost its first tokens."""
        reader = self._readers.setdefault(id(candidate), _DraftReader(candidate))
        reader.drafts = []
        context = list(candidate.context)
        if reader.table is not None and context[: len(reader.context)] != reader.context:
            self._manager.close(reader.table)
            reader.table = None
        reader.context = context
        return reader

    def _reserve(self, reader: _DraftReader) -> bool:
        """Reserves blocks for the unread tokens; returns whether there were enough."""
        if reader.table is None:
            reader.table = self._manager.open(reader.context, reader.salt)
        table = reader.table
        if table.num_tokens == len(reader.context) and not reader.drafts:
            table.num_tokens -= 1  # the newest token is read again, to predict what follows it
        count = len(reader.context) + len(reader.drafts) - table.num_tokens
        reader.grant = Grant.of(reader, table, count)
        copies = self._manager.reserve(table, count)
        reader.copies = copies or []
        return copies is not None


class _DraftReader:
    """A text as the smaller model reads it; see `scheduler.Reader`."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self.context: list[int] = []
        self.drafts: list[int] = []
        self.salt = candidate.salt
        self.adapter: Adapter | None = None  # guesses need none
        self.table: BlockTable | None = None
        self.grant: Grant
        self.copies: list[Copy] = []

    @property
    def is_open(self) -> bool:
        """Whether another guess can be used."""
        return len(self.drafts) < self._candidate.num_guessable

    def share(self) -> Share:
        """The chunk that the next pass reads."""
        return Share(self._candidate.request, [self.grant], self.copies)

    def row(self) -> Row:
        """The sampler's row for the next guess, with the seed and settings of the text itself."""
        return self._candidate.row(self.drafts)
