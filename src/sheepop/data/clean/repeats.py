"""Finds repeated lines and repeated runs of words, the latter by sorting 64-bit hashes of the runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sheepop.data.clean.config import RepetitionConfig
from sheepop.data.clean.words import Hashes, Ints, Tokens

_FACTOR = np.uint64(0xD1342543DE82EF95)
# 16 of the 64 bits of a run hold the number of its text, which is enough for every batch.
_NUMBER_SHIFT = np.uint64(48)


def duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """The number of `parts` that repeat an earlier one, and the characters in them."""
    distinct = set(parts)
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


def screened(all_tokens: Sequence[Tokens], sizes: Sequence[int], config: RepetitionConfig) -> list[bool]:
    """Which texts, of `sizes` characters, may repeat more runs than the bounds allow, by quick upper bounds for all."""
    suspects = np.array([len(tokens) > 0 for tokens in all_tokens])
    if suspects.any():
        full = np.flatnonzero(suspects)
        room = np.array(sizes, np.float64)[full]
        screen = _Screen([tokens for tokens in all_tokens if len(tokens)])
        found = np.zeros(len(full), np.bool_)
        for n, most in sorted(config.top_ngrams):
            found |= screen.most_frequent(n) > most * room
        if config.duplicate_ngrams:
            fewest, least = map(min, zip(*config.duplicate_ngrams, strict=True))
            found |= screen.covered(fewest) > least * room
        suspects[full] = found
    return suspects.tolist()


class _Runs:
    """Hashes of the runs of n successive tokens in joined texts; cheapest to compute with rising n."""

    def __init__(self, all_tokens: Sequence[Tokens]) -> None:
        self._hashes = np.concatenate([tokens.hashes() for tokens in all_tokens])
        self._token_lengths = np.concatenate([tokens.lengths for tokens in all_tokens])
        self._ends = np.zeros(len(self._hashes) + 1, np.int64)
        np.cumsum(self._token_lengths, out=self._ends[1:])
        self._n, self._current = 1, self._hashes

    def _lengths(self, n: int) -> Ints:
        """The characters in each run of `n` tokens, written with spaces between."""
        return self._ends[n:] - self._ends[:-n] + (n - 1)

    def _runs(self, n: int) -> Hashes:
        if n < self._n:
            self._n, self._current = 1, self._hashes
        while self._n < n:
            self._current = self._current[:-1] * _FACTOR + self._hashes[self._n :]
            self._n += 1
        return self._current


class _Screen(_Runs):
    """Many texts joined into one; each run includes the number of its text, so that texts share no runs."""

    def __init__(self, all_tokens: Sequence[Tokens]) -> None:
        super().__init__(all_tokens)
        counts = np.array([len(tokens) for tokens in all_tokens])
        self._begins = np.cumsum(counts) - counts
        self._numbers = np.repeat(np.arange(len(counts), dtype=np.uint64) << _NUMBER_SHIFT, counts)

    def most_frequent(self, n: int) -> Ints:
        """For each text an upper bound of the characters in all occurrences of its most frequent run of `n` tokens."""
        largest = np.zeros(len(self._begins), np.int64)
        ordered = np.sort(self._numbered(n))
        if not len(ordered):
            return largest
        firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(firsts, append=len(ordered))
        numbers = (ordered.take(firsts) >> _NUMBER_SHIFT).astype(np.int64)
        groups = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        largest[numbers.take(groups)] = np.maximum.reduceat(counts, groups)
        lengths = np.concatenate([self._lengths(n), np.zeros(n - 1, np.int64)])
        return largest * np.maximum.reduceat(lengths, self._begins)

    def covered(self, n: int) -> Ints:
        """For each text the characters in tokens of any run of `n` that occurs more than once."""
        places = _repeated(self._numbered(n))
        covered = np.zeros(len(self._hashes), np.bool_)
        for offset in range(n):
            covered[places + offset] = True
        return np.add.reduceat(np.where(covered, self._token_lengths, 0), self._begins)

    def _numbered(self, n: int) -> Hashes:
        runs = self._runs(n)
        return (runs >> (np.uint64(64) - _NUMBER_SHIFT)) | self._numbers[: len(runs)]


def _repeated(runs: Hashes) -> Ints:
    """The positions of runs that occur more than once."""
    order = np.argsort(runs)
    ordered = runs.take(order)
    twice = np.zeros(len(runs), np.bool_)
    same = ordered[1:] == ordered[:-1]
    twice[1:] = same
    twice[:-1] |= same
    return np.asarray(order[twice], np.int64)


class RepeatedRuns(_Runs):
    """The runs of n successive tokens of one text; call its methods with rising n.

    A repeated run of n + 1 tokens begins at a repeated run of n tokens, so the result for one n bounds the next, and
    most texts need only two sorts.
    """

    def __init__(self, tokens: Tokens) -> None:
        super().__init__([tokens])
        self._largest_count = len(tokens)
        self._places = np.arange(len(tokens))

    def most_frequent(self, n: int, limit: float) -> int:
        """Characters in the first most frequent run of `n` tokens, spaced, times its count; 0 if at most `limit`."""
        lengths = self._lengths(n)
        longest = int(lengths.max(initial=0))
        if self._largest_count * longest <= limit:
            return 0
        runs = self._runs(n)
        if not len(runs):
            return 0
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

    def repeated(self, n: int) -> int:
        """Characters in runs of `n` tokens that repeat earlier ones, counted from the start without overlaps."""
        runs = self._runs(n)
        places = self._places[: np.searchsorted(self._places, len(runs))]
        if len(places):
            places = np.sort(places.take(_repeated(runs.take(places))))
        self._places = places
        lengths = self._ends.take(places + n) - self._ends.take(places)
        seen: set[int] = set()
        characters, free = 0, 0
        for place, run, length in zip(places.tolist(), runs.take(places).tolist(), lengths.tolist(), strict=True):
            if place < free:
                continue
            if run in seen:
                characters += length
                free = place + n
            else:
                seen.add(run)
        return characters
