"""The Unigram model (Kudo 2018): the most probable cut of a text into pieces, and bytes for unknown characters.

Pieces are learned by expectation maximization and pruning (section 3.2). The trainer of the library iterates over hash
tables in random order, and returns a different vocabulary each time; here the same words give the same pieces. The
library does the encoding.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.interface import SPECIAL_TOKENS
from sheepop.tokenizer.pattern import SHEEPOP, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, special_token_entries, standard_settings
from sheepop.tokenizer.vocabulary import BYTE_TOKENS, JSON_HEAD, PRINTABLE_ASCII, frequent_characters, require_size

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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
    # Begins with each candidate's share of all occurrences.
    frequency = np.maximum(lattice.frequencies(counts, len(texts)), 1.0)
    logs = np.log(frequency) - np.log(frequency.sum())
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
    # The whole alphabet, and the most probable other pieces.
    others = [number for number in range(len(alphabet), len(texts)) if np.isfinite(logs[number])]
    others.sort(key=lambda number: (-logs[number], texts[number]))
    chosen = [*range(len(alphabet)), *others[: max(0, size - len(alphabet))]]
    pieces = [(texts[number], round(float(logs[number]), 6)) for number in chosen]
    return sorted(pieces, key=lambda piece: (-piece[1], piece[0]))


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


# Pieces are learned from the most frequent words, with at most this many characters in total.
_MOST_CHARACTERS = 2**22

# The log probability of bytes and special tokens, so that no segmentation prefers them to pieces.
_NEVER = -1000.0


def train_unigram(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> BackendTokenizer:
    """Learns pieces from `texts`, which are read once and kept in memory; the same texts give the same file.

    Text is not normalized, spaces belong to pieces, and characters without a piece become bytes, so every Unicode text
    is decoded exactly. The ids 0 to 3 are the usual special tokens, 4 to 259 the bytes, and the last ids the further
    `special_tokens`. Raises `TokenizerError` if the texts have too many characters or too few words for the size.
    """
    smallest = SMALLEST_VOCABULARY["unigram"] + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"A Unigram vocabulary needs at least {smallest} tokens ({len(SPECIAL_TOKENS) + len(special_tokens)} "
            f"special tokens, 256 bytes and {len(PRINTABLE_ASCII) + 1} characters), got vocab_size={vocab_size}."
        )
    kept = list(unicode_texts(texts))
    alphabet = sorted({*frequent_characters(kept), *PRINTABLE_ASCII, " "})
    reserved = len(SPECIAL_TOKENS) + len(BYTE_TOKENS) + len(special_tokens)
    if reserved + len(alphabet) > vocab_size:
        raise TokenizerError(
            f"The text has {len(alphabet)} frequent characters, which with {reserved} special tokens and bytes make a "
            f"vocabulary of {reserved + len(alphabet)}, but tokenizer.vocab_size is {vocab_size}. Set "
            f"tokenizer.vocab_size={reserved + len(alphabet)} or more, or use algorithm bpe."
        )
    pieces = learn_pieces(_words(kept, alphabet), alphabet, vocab_size - reserved)
    require_size(reserved + len(pieces), vocab_size)
    return BackendTokenizer(*_file(pieces, special_tokens))


def _words(texts: Iterable[str], alphabet: Sequence[str]) -> dict[str, int]:
    """The parts into which text is cut, with their counts, without characters that are not in `alphabet`."""
    import regex  # type: ignore[import-untyped, unused-ignore]

    find = regex.compile(SHEEPOP.regex).findall
    parts: Counter[str] = Counter()
    for text in texts:
        parts.update(find(text))
    between = re.compile(f"[^{re.escape(''.join(alphabet))}]+")
    words: Counter[str] = Counter()
    for part, count in parts.items():
        for run in between.split(part):
            for start in range(0, len(run), LONGEST_WORD):
                words[run[start : start + LONGEST_WORD]] += count
    total = 0

    def fits(word: str) -> bool:
        nonlocal total
        total += len(word)
        return total <= _MOST_CHARACTERS

    ordered = sorted(words, key=lambda word: (-words[word], word))
    return {word: words[word] for word in takewhile(fits, ordered)}


def _file(pieces: Sequence[tuple[str, float]], special_tokens: Sequence[str]) -> tuple[str, dict[str, object]]:
    first = [(text, _NEVER) for text in (*SPECIAL_TOKENS.values(), *BYTE_TOKENS)]
    vocabulary = [*first, *pieces]
    further = further_special_tokens(special_tokens, {text for text, _ in vocabulary})
    description = {
        **JSON_HEAD,
        "added_tokens": special_token_entries() + special_token_entries(len(vocabulary), further),
        "normalizer": None,
        "pre_tokenizer": SHEEPOP.step,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": vocabulary, "byte_fallback": True},
    }
    ids = {text: len(vocabulary) + number for number, text in enumerate(further)}
    return json.dumps(description, ensure_ascii=False, separators=(",", ":")), standard_settings(ids)
