"""All segmentations of many words into pieces; words of equal length share a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONGEST_PIECE = 16


@dataclass(frozen=True)
class _Table:
    """The W words of one length: `words` are their indices, and row s of `pieces` (S, W) has the piece at span s.

    For a word without a piece there, it is the number of all pieces.
    """

    length: int
    words: NDArray[np.int64]
    pieces: NDArray[np.int32]


def _spans(length: int) -> Iterator[tuple[int, int, int]]:
    """Row, start and end of every span that a piece may have in a word of `length` characters, ordered by end."""
    row = 0
    for end in range(1, length + 1):
        for start in range(max(0, end - LONGEST_PIECE), end):
            yield row, start, end
            row += 1


class WordLattice:
    """The pieces at every span of `words`; `ids` numbers the pieces from 0 without gaps."""

    def __init__(self, words: Sequence[str], ids: Mapping[str, int]) -> None:
        self._none = len(ids)
        by_length: dict[int, list[int]] = {}
        for number, word in enumerate(words):
            by_length.setdefault(len(word), []).append(number)
        self._tables = []
        for length, numbers in sorted(by_length.items()):
            group = [words[number] for number in numbers]
            rows = [[ids.get(word[start:end], self._none) for word in group] for _, start, end in _spans(length)]
            self._tables.append(_Table(length, np.array(numbers, dtype=np.int64), np.array(rows, dtype=np.int32)))

    def frequencies(self, counts: Floats, num_pieces: int) -> Floats:
        """How often every piece occurs at any position in the words; `counts` are those of the words."""
        total = np.zeros(num_pieces + 1)
        for table in self._tables:
            weights = np.broadcast_to(counts[table.words], table.pieces.shape)
            total += np.bincount(table.pieces.ravel(), weights=weights.ravel(), minlength=num_pieces + 1)
        return total[:num_pieces]

    def expected_counts(self, probabilities: Floats, counts: Floats) -> Floats:
        """The expected count of every piece over all segmentations of the words (forward-backward)."""
        p = np.append(probabilities, 0.0)
        total = np.zeros(len(p))
        for table in self._tables:
            chances = p[table.pieces]
            forward = np.zeros((table.length + 1, len(table.words)))
            backward = np.zeros_like(forward)
            forward[0] = backward[-1] = 1.0
            spans = list(_spans(table.length))
            for row, start, end in spans:
                forward[end] += forward[start] * chances[row]
            for row, start, end in reversed(spans):
                backward[start] += chances[row] * backward[end]
            scale = counts[table.words] / forward[-1]
            for row, start, end in spans:
                chances[row] *= forward[start] * backward[end] * scale
            total += np.bincount(table.pieces.ravel(), weights=chances.ravel(), minlength=len(p))
        return total[:-1]

    def best_without_itself(self, logs: Floats) -> Floats:
        """The score of the best segmentation of every word into at least two pieces (Viterbi)."""
        scores = np.append(logs, -np.inf)
        best = np.empty(sum(len(table.words) for table in self._tables))
        for table in self._tables:
            reached = np.full((table.length + 1, len(table.words)), -np.inf)
            reached[0] = 0.0
            for row, start, end in _spans(table.length):
                if (start, end) != (0, table.length):
                    np.maximum(reached[end], reached[start] + scores[table.pieces[row]], out=reached[end])
            best[table.words] = reached[-1]
        return best
