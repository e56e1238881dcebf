"""Speculative decoding: guesses of the next tokens, which the network checks in one pass (Leviathan et al. 2023).

A sampled token depends only on the logits, the request's seed and its position. So a token is sampled after each guess,
and guesses are accepted up to the first that differs: the text is the same as without guesses. Good guesses save
passes, bad ones cost a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sheepop.generate.blocks import BlockManager
from sheepop.generate.request import Candidate
from sheepop.generate.runner import PagedRunner
from sheepop.generate.sampler import Sampler
from sheepop.generate.scheduler import Grant, Reader

_SIZES = (3, 2)  # of the n-grams that a lookup tries


class LookupDrafter:
    """Guesses the tokens that followed the last n tokens where these occurred before (Saxena 2023, prompt lookup).

    It tries n = 3, then n = 2. A text gets at most `count` guesses.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._indexes: dict[Candidate, _Index] = {}

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Returns the guesses for each text, at most its `num_guessable`, possibly none."""
        found = []
        for candidate in candidates:
            index = self._indexes.setdefault(candidate, _Index())
            index.read([*candidate.request.prompt.token_ids, *candidate.token_ids])
            found.append(index.follows(min(self.count, candidate.num_guessable)))
        return found

    def forget(self, candidate: Candidate) -> None:
        """Drops the index of a text that has ended."""
        self._indexes.pop(candidate, None)

    def reset(self) -> None:
        """Drops all indexes."""
        self._indexes.clear()


class _Index:
    """The last position at which each n-gram ended, before the end of the text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def read(self, tokens: list[int]) -> None:
        """Reads the new tokens; an n-gram is indexed once a token follows it."""
        for end in range(len(self._tokens), len(tokens)):
            for size in _SIZES:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._tokens = tokens

    def follows(self, count: int) -> list[int]:
        """The up to `count` tokens that followed the longest final n-gram that occurred before."""
        for size in _SIZES:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                return self._tokens[end : end + count]
        return []


class ModelDrafter:
    """Guesses with a smaller model of the same vocabulary, which samples with the same seeds and so often agrees.

    A text gets at most `count` guesses.
    """

    def __init__(self, runner: PagedRunner, sampler: Sampler, manager: BlockManager, count: int) -> None:
        self.count = count
        self._runner, self._sampler, self._manager = runner, sampler, manager
        self._readers: dict[Candidate, Reader] = {}

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Returns the guesses for each text, at most its `num_guessable`; without free blocks it gets no more."""
        readers = {candidate: self._reader(candidate) for candidate in candidates}
        guessing = candidates
        for _ in range(self.count):
            reserved = {candidate: self._grant(candidate, readers[candidate]) for candidate in guessing}
            grants = {candidate: grant for candidate, grant in reserved.items() if grant is not None}
            if not grants:
                break
            guessing = list(grants)
            logits = self._runner.run(list(grants.values()))
            ends = accumulate(grant.num_predictions for grant in grants.values())
            logits = logits[torch.tensor([end - 1 for end in ends], device=logits.device)]
            # The seeds and settings are those of the texts themselves.
            rows = [candidate.row(readers[candidate].drafts) for candidate in guessing]
            chosen = self._sampler.choose(logits, rows)
            for (reader, chunk, *_), token_id in zip(grants.values(), chosen.token_ids, strict=True):
                self._manager.advance(chunk.table, reader.context, len(reader.context))
                reader.drafts.append(token_id)
        return [reader.drafts for reader in readers.values()]

    def forget(self, candidate: Candidate) -> None:
        """Frees the blocks of a text that has ended."""
        reader = self._readers.pop(candidate, None)
        if reader is not None and reader.table is not None:
            self._manager.close(reader.table)

    def reset(self) -> None:
        """Frees all blocks, and forgets what they hold."""
        self._readers.clear()
        self._manager.forget()

    def _reader(self, candidate: Candidate) -> Reader:
        """The smaller model's reader of a text; it starts again if the text has lost its first tokens."""
        new = Reader([], candidate.salt, source_ids=candidate.source_ids)  # guesses need no adapter
        reader = self._readers.setdefault(candidate, new)
        reader.drafts = []
        context = list(candidate.context)
        if reader.table is not None and context[: len(reader.context)] != reader.context:
            self._manager.close(reader.table)
            reader.table = None
        reader.context = context
        return reader

    def _grant(self, candidate: Candidate, reader: Reader) -> Grant | None:
        """The unread tokens and blocks for them; None if no other guess can be used, or blocks are missing."""
        if len(reader.drafts) >= candidate.num_guessable:
            return None
        if reader.table is None:
            reader.table = self._manager.open(reader.context, reader.salt)
        table = reader.table
        if table.num_tokens == len(reader.context) and not reader.drafts:
            table.num_tokens -= 1  # the newest token is read again, to predict what follows it
        count = len(reader.context) + len(reader.drafts) - table.num_tokens
        copies = self._manager.reserve(table, count)
        return None if copies is None else Grant.of(reader, table, count, copies)


Drafter = LookupDrafter | ModelDrafter
"""A source of guesses."""
