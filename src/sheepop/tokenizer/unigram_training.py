"""Learns the pieces of a Unigram model by expectation maximization and pruning (Kudo 2018, section 3.2).

The library's own trainer iterates over hash tables in random order, and returns a different vocabulary each time. Here
the same words give the same pieces. The library does the encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sheepop.tokenizer.word_lattice import LONGEST_PIECE, WordLattice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_WORD = 24
"""The most characters in a word, so that its probability stays far above the smallest float64."""

# The number of candidates per requested piece, the least number, and the share that each round keeps.
_CANDIDATES, _LEAST_CANDIDATES = 20, 20_000
_SHRINKING = 0.75
_ITERATIONS = 2
# Pruning ends slightly above the goal; the final pieces are chosen by probability.
_MARGIN = 1.1
_LEAST_EXPECTED = 0.5


def learn_pieces(words: Mapping[str, int], alphabet: Sequence[str], size: int) -> list[tuple[str, float]]:
    """Pieces with the logarithms of their weights, in descending order: all of `alphabet`, and others up to `size`.

    If `alphabet` has more than `size` characters, so does the result. The weights are the probabilities of the pieces
    except for the sparse prior (see `_maximised`), under which they sum to less than one. `words`, with their counts,
    have at most `LONGEST_WORD` characters, all in `alphabet`. The result does not depend on their order.
    """
    ordered = sorted(words)
    counts = np.array([words[word] for word in ordered], dtype=np.float64)
    texts = [*alphabet, *_candidates(ordered, counts, max(_CANDIDATES * size, _LEAST_CANDIDATES))]
    ids = {text: number for number, text in enumerate(texts)}
    lattice = WordLattice(ordered, ids)
    own_lattice = WordLattice(texts[len(alphabet) :], ids)
    logs = _initial_logs(lattice, counts, len(texts))
    while True:
        expected = np.zeros(len(texts))
        for _ in range(_ITERATIONS):
            expected = lattice.expected_counts(np.exp(logs), counts)
            logs = _maximised(expected, len(alphabet))
        alive = int(np.isfinite(logs).sum())
        goal = max(int(_MARGIN * size), len(alphabet))
        if alive <= goal:
            break
        # The loss in log likelihood if the occurrences of a piece are replaced with other pieces.
        candidates = len(alphabet) + np.flatnonzero(np.isfinite(logs[len(alphabet) :]))
        alternatives = own_lattice.best_without_itself(logs)[candidates - len(alphabet)]
        loss = expected[candidates] * (logs[candidates] - alternatives)
        keep = max(goal, int(_SHRINKING * alive)) - len(alphabet)
        logs[candidates[np.argsort(-loss, kind="stable")[keep:]]] = -np.inf
    return _chosen(texts, logs, len(alphabet), size)


def _chosen(texts: Sequence[str], logs: Floats, num_characters: int, size: int) -> list[tuple[str, float]]:
    """The whole alphabet and the most probable other pieces."""
    others = [number for number in range(num_characters, len(texts)) if np.isfinite(logs[number])]
    others.sort(key=lambda number: (-logs[number], texts[number]))
    chosen = [*range(num_characters), *others[: max(0, size - num_characters)]]
    pieces = [(texts[number], round(float(logs[number]), 6)) for number in chosen]
    return sorted(pieces, key=lambda piece: (-piece[1], piece[0]))


def _initial_logs(lattice: WordLattice, counts: Floats, num_pieces: int) -> Floats:
    """The logarithm of every candidate's share of all occurrences."""
    frequency = np.maximum(lattice.frequencies(counts, num_pieces), 1.0)
    return np.asarray(np.log(frequency) - np.log(frequency.sum()))


def _maximised(expected: Floats, num_characters: int) -> Floats:
    """exp(E[log p]) of every piece under a sparse Dirichlet prior, as a logarithm: digamma(c) - digamma(sum of c).

    A piece with too small an expected count is dropped (-inf); the characters, which are first, keep at least the
    minimum count.
    """
    expected = expected.copy()
    expected[:num_characters] = np.maximum(expected[:num_characters], _LEAST_EXPECTED)
    alive = expected >= _LEAST_EXPECTED
    logs = np.full(len(expected), -np.inf)
    logs[alive] = _digamma(expected[alive]) - _digamma(expected[alive].sum(keepdims=True))
    return logs


def _digamma(x: Floats) -> Floats:
    """The derivative of log Gamma, from six steps of its recurrence and the asymptotic series."""
    shift = np.zeros_like(x)
    for _ in range(6):
        shift -= 1 / x
        x = x + 1
    inverse = 1 / (x * x)
    return np.asarray(shift + np.log(x) - 0.5 / x - inverse * (1 / 12 - inverse * (1 / 120 - inverse / 252)))


def _candidates(words: Sequence[str], counts: Floats, most: int) -> list[str]:
    """The substrings of 2 to `LONGEST_PIECE` characters that cover the most text, among those seen at least twice.

    A substring is numbered by the number of its prefix without the last character, and that character, so only the
    chosen substrings are built.
    """
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    text = np.frombuffer("".join(words).encode("utf-32-le"), dtype="<u4").astype(np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    weights = np.repeat(counts, lengths)
    places: Ints = np.arange(len(text))
    names: Ints = text
    found: list[tuple[Ints, Floats, int]] = []
    for length in range(2, LONGEST_PIECE + 1):
        inside = places + length <= ends[places]
        places, names = places[inside], names[inside]
        keys = names * 2**21 + text[places + length - 1]
        _, first, names = np.unique(keys, return_index=True, return_inverse=True)
        seen = np.bincount(names, weights=weights[places], minlength=len(first)).astype(np.float64)
        found.append((places[first[seen >= 2]], seen[seen >= 2], length))
        repeated = (seen >= 2)[names]
        places, names = places[repeated], names[repeated]
    starts = np.concatenate([starts for starts, _, _ in found])
    gains = np.concatenate([seen * length for _, seen, length in found])
    sizes = np.concatenate([np.full(len(starts), length) for starts, _, length in found])
    order = np.argsort(-gains, kind="stable")[:most]
    joined = "".join(words)
    return [joined[start : start + length] for start, length in zip(starts[order], sizes[order], strict=True)]
