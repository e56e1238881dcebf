"""Runs of words that a text repeats, found by sorting numbers of 64 bits that stand for the runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sheepop.data.clean.config import RepetitionConfig
from sheepop.data.clean.words import Hashes, Ints, Tokens

_FACTOR = np.uint64(0xD1342543DE82EF95)
# Of the 64 bits of a run, 16 for the number of the text are enough for every batch.
_NUMBER_SHIFT = np.uint64(48)
MOST_TEXTS = 2**16


def screened(all_tokens: Sequence[Tokens], sizes: Sequence[int], config: RepetitionConfig) -> list[bool]:
    """Which texts, of `sizes` characters, might repeat more runs of words than the bounds allow.

    All texts are looked at together, with bounds that are quick to find; `RepeatedRuns` knows the truth.
    """
    full = [number for number, tokens in enumerate(all_tokens) if len(tokens)]
    suspects = np.zeros(len(all_tokens), np.bool_)
    if full:
        room = np.array([sizes[number] for number in full], np.float64)
        screen = _Screen([all_tokens[number] for number in full])
        suspicious = np.zeros(len(full), np.bool_)
        for n, most in sorted(config.top_ngrams):
            suspicious |= screen.most_frequent(n) > most * room
        if config.duplicate_ngrams:
            fewest = min(n for n, _ in config.duplicate_ngrams)
            suspicious |= screen.covered(fewest) > min(most for _, most in config.duplicate_ngrams) * room
        suspects[full] = suspicious
    return suspects.tolist()


class _Screen:
    """Many texts as one; runs of words bear the number of their text, so that none is found in two."""

    def __init__(self, all_tokens: Sequence[Tokens]) -> None:
        counts = np.array([len(tokens) for tokens in all_tokens])
        self._begins = np.cumsum(counts) - counts
        self._numbers = np.repeat(np.arange(len(counts), dtype=np.uint64) << _NUMBER_SHIFT, counts)
        self._hashes = np.concatenate([tokens.hashes() for tokens in all_tokens])
        self._lengths = np.concatenate([tokens.lengths for tokens in all_tokens])
        self._ends = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=self._ends[1:])
        self._n, self._current = 1, self._hashes

    def most_frequent(self, n: int) -> Ints:
        """For each text no fewer characters than the most frequent run of `n` tokens has in all."""
        total = len(self._hashes)
        if total < n:
            return np.zeros(len(self._begins), np.int64)
        ordered = np.sort(self._runs(n))
        firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(firsts, append=len(ordered))
        numbers = (ordered.take(firsts) >> _NUMBER_SHIFT).astype(np.int64)
        largest = np.zeros(len(self._begins), np.int64)
        groups = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        largest[numbers.take(groups)] = np.maximum.reduceat(counts, groups)
        lengths = np.zeros(total, np.int64)
        lengths[: total - n + 1] = self._ends[n:] - self._ends[:-n] + (n - 1)
        return largest * np.maximum.reduceat(lengths, self._begins)

    def covered(self, n: int) -> Ints:
        """For each text the characters in tokens that belong to any run of `n` that comes more than once."""
        if len(self._hashes) < n:
            return np.zeros(len(self._begins), np.int64)
        places = _repeated(self._runs(n))
        covered = np.zeros(len(self._hashes) + n, np.bool_)
        for offset in range(n):
            covered[places + offset] = True
        return np.add.reduceat(np.where(covered[: len(self._hashes)], self._lengths, 0), self._begins)

    def _runs(self, n: int) -> Hashes:
        if n < self._n:
            self._n, self._current = 1, self._hashes
        while self._n < n:
            self._current = self._current[:-1] * _FACTOR + self._hashes[self._n :]
            self._n += 1
        numbers = self._numbers[: len(self._current)]
        return (self._current >> np.uint64(64 - int(_NUMBER_SHIFT))) | numbers


def _repeated(runs: Hashes) -> Ints:
    """The places of runs that come more than once."""
    order = np.argsort(runs)
    ordered = runs.take(order)
    twice = np.zeros(len(runs), np.bool_)
    same = ordered[1:] == ordered[:-1]
    twice[1:] = same
    twice[:-1] |= same
    return np.asarray(order[twice], np.int64)


class RepeatedRuns:
    """The runs of n successive tokens of a text, to be asked for with rising n.

    Longer runs that come twice begin where shorter ones do that come twice, so what was found for one n bounds what
    there can be for the next, and most texts are done after two sorts.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._hashes = tokens.hashes()
        self._num_tokens = len(tokens)
        self._lengths = tokens.lengths
        self._ends = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(tokens.lengths, out=self._ends[1:])
        self._n, self._current = 1, self._hashes
        self._largest_count = len(tokens)
        self._places: Ints | None = None

    def most_frequent(self, n: int, limit: float) -> int:
        """Characters in the most frequent run of `n` tokens, written with spaces between, times how often it comes.

        Of several the first counts. The answer may be 0 where it could not be more than `limit`.
        """
        if self._num_tokens < n:
            return 0
        lengths = self._ends[n:] - self._ends[:-n] + (n - 1)
        longest = int(lengths.max())
        if self._largest_count * longest <= limit:
            return 0
        runs = self._runs(n)
        ordered = np.sort(runs)
        begins = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [len(ordered)]])
        counts = begins[1:] - begins[:-1]
        self._largest_count = int(counts.max())
        if self._largest_count * longest <= limit:
            return 0
        candidates = ordered[begins[:-1][counts == self._largest_count]]
        nearest = np.minimum(np.searchsorted(candidates, runs), len(candidates) - 1)
        first = int(np.argmax(candidates.take(nearest) == runs))
        return int(lengths[first]) * self._largest_count

    def covered(self, n: int) -> int:
        """Characters in tokens that belong to any run of `n` that comes more than once."""
        places = self._repeated_places(n)
        covered = np.zeros(self._num_tokens, np.bool_)
        for offset in range(n):
            covered[places + offset] = True
        return int(self._lengths[covered].sum())

    def repeated(self, n: int) -> int:
        """Characters in runs of `n` tokens that came before, reading from the beginning and on after each."""
        places = self._repeated_places(n)
        lengths = self._ends.take(places + n) - self._ends.take(places)
        seen: set[int] = set()
        characters, free = 0, 0
        runs = self._runs(n).take(places)
        for place, run, length in zip(places.tolist(), runs.tolist(), lengths.tolist(), strict=True):
            if place < free:
                continue
            if run in seen:
                characters += length
                free = place + n
            else:
                seen.add(run)
        return characters

    def _repeated_places(self, n: int) -> Ints:
        """Where runs of `n` tokens begin that come more than once, in order."""
        num_runs = max(0, self._num_tokens - n + 1)
        places = np.arange(num_runs) if self._places is None else self._places[self._places < num_runs]
        if len(places):
            places = np.sort(places.take(_repeated(self._runs(n).take(places))))
        self._places = places
        return places

    def _runs(self, n: int) -> Hashes:
        if n < self._n:
            self._n, self._current = 1, self._hashes
        while self._n < n:
            self._current = self._current[:-1] * _FACTOR + self._hashes[self._n :]
            self._n += 1
        return self._current
