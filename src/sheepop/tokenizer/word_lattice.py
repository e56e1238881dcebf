"""All ways to cut words into pieces, many words at a time: words of one length share a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONGEST_PIECE = 16


@dataclass(frozen=True)
class _Table:
    """The W words of one length: `words` are their places in the list, and row s of `pieces` (S, W) the piece that
    each of them has at the span s, or the number of pieces where it has none there.
    """

    length: int
    words: NDArray[np.int64]
    pieces: NDArray[np.int32]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Row, start and end of every span, by its end."""
        return enumerate_spans(self.length)


def enumerate_spans(length: int) -> Iterator[tuple[int, int, int]]:
    """Row, start and end of every span that a piece may have in a word of `length` characters, by its end."""
    row = 0
    for end in range(1, length + 1):
        for start in range(max(0, end - LONGEST_PIECE), end):
            yield row, start, end
            row += 1


class WordLattice:
    """The pieces at every span of `words`; `ids` gives the number of a piece, from 0 on without gaps."""

    def __init__(self, words: Sequence[str], ids: Mapping[str, int]) -> None:
        self._none = len(ids)
        by_length: dict[int, list[int]] = {}
        for number, word in enumerate(words):
            by_length.setdefault(len(word), []).append(number)
        self._tables = []
        for length, numbers in sorted(by_length.items()):
            group = [words[number] for number in numbers]
            rows = [
                [ids.get(word[start:end], self._none) for word in group] for _, start, end in enumerate_spans(length)
            ]
            self._tables.append(_Table(length, np.array(numbers, dtype=np.int64), np.array(rows, dtype=np.int32)))

    def frequencies(self, counts: Floats, num_pieces: int) -> Floats:
        """How often every piece occurs in the words, wherever it may stand; `counts` are those of the words."""
        total = np.zeros(num_pieces + 1)
        for table in self._tables:
            weights = np.broadcast_to(counts[table.words], table.pieces.shape)
            total += np.bincount(table.pieces.ravel(), weights=weights.ravel(), minlength=num_pieces + 1)
        return total[:num_pieces]

    def expected_counts(self, probabilities: Floats, counts: Floats) -> Floats:
        """How often every piece is expected in the words, over all their segmentations (forward-backward)."""
        p = np.append(probabilities, 0.0)
        total = np.zeros(len(p))
        for table in self._tables:
            chances = p[table.pieces]
            forward = np.zeros((table.length + 1, len(table.words)))
            backward = np.zeros_like(forward)
            forward[0] = backward[-1] = 1.0
            spans = list(table.spans())
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
        """The score of every word's best segmentation into more than one piece (Viterbi)."""
        scores = np.append(logs, -np.inf)
        best = np.empty(sum(len(table.words) for table in self._tables))
        for table in self._tables:
            reached = np.full((table.length + 1, len(table.words)), -np.inf)
            reached[0] = 0.0
            for row, start, end in table.spans():
                if (start, end) != (0, table.length):
                    np.maximum(reached[end], reached[start] + scores[table.pieces[row]], out=reached[end])
            best[table.words] = reached[-1]
        return best
