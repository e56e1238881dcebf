"""Turns documents into sets of shingles, the hashes of every few consecutive words.

Prose and chat are compared by lower-case words, so that punctuation, case and line breaks do not matter. Code, tables
and pairs are compared by tokens, words with the punctuation that follows, so that only white space does not matter.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import derive_seed

Hashes = NDArray[np.uint64]
Rule = Literal["words", "tokens"]

_RULES: dict[str, Rule] = {"prose": "words", "chat": "words", "code": "tokens", "table": "tokens", "pair": "tokens"}
# A longer run counts as several words: encoded data has no words, and this keeps the table of weights short.
LONGEST_WORD = 64
_BLOCK_CHARACTERS = 2**15
_SHIFT = np.uint64(32)
_MIX_SHIFT, _MIX_FIRST, _MIX_SECOND = np.uint64(29), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

# BETWEEN: between words, WORD: part of a word, ALONE: a word by itself, ATTACHED: the end of the word before it.
BETWEEN, WORD, ALONE, ATTACHED = range(4)

# Higher planes contain ideographs, private-use characters or nothing; all count as ideographs.
_TABLE_SIZE = 0x20000
_ASCII_SIZE = 0x80 + 1  # a small table, so that a build of plain English need not make the large one
_LETTERS_NUMBERS_MARKS = ("L", "N", "M")
# Scripts written without spaces: Thai, Lao, Myanmar, Khmer; kana, bopomofo and ideographs with their extensions.
_WITHOUT_SPACES = (
    "0E00-0EFF 1000-109F 1780-17FF 3005-3007 3021-312F 3190-31FF 3400-4DBF 4E00-9FFF A9E0-A9FE AA60-AA7F F900-FAFF "
    "FF66-FF9F 16FE0-18D8F 1AFF0-1B2FF"
)


@dataclass(frozen=True, slots=True)
class CharacterTable:
    """The role of every code point and the value to hash, as arrays, and as translation tables for ASCII."""

    roles: NDArray[np.uint8]
    values: NDArray[np.uint32]
    ascii_roles: bytes
    ascii_values: bytes
    ascii_between: bytes


@cache
def character_table(rule: Rule, size: int = _TABLE_SIZE) -> CharacterTable:
    """The table of a rule; its last entry stands for all code points from ``size - 1`` on.

    ``words``: letters, digits and marks form words, in lower case; everything else separates them. ``tokens``: case
    matters, the underscore is a letter, and punctuation belongs to the word before it; only white space and controls
    separate. In both, a character of a script without spaces is a word by itself.
    """
    roles, values = np.zeros(size, np.uint8), np.arange(size, dtype=np.uint32)
    for code in range(size):
        character = chr(code)
        category = unicodedata.category(character)[0]
        if category in _LETTERS_NUMBERS_MARKS or (rule == "tokens" and character == "_"):
            roles[code] = WORD
        elif rule == "tokens" and category not in ("Z", "C"):
            roles[code] = ATTACHED
        lowered = character.lower()
        if rule == "words" and len(lowered) == 1:
            values[code] = ord(lowered)
    for span in _WITHOUT_SPACES.split():
        first, last = (int(code, 16) for code in span.split("-"))
        script = roles[first : last + 1]
        script[script == WORD] = ALONE
    roles[-1] = ALONE
    between = bytes(code for code in range(128) if roles[code] == BETWEEN)
    ascii_roles, ascii_values = (bytes(array[:128].tolist()) + bytes(128) for array in (roles, values))
    return CharacterTable(roles, values, ascii_roles, ascii_values, between)


def distinct(hashes: Hashes) -> Hashes:
    """Each hash once, in ascending order."""
    ordered = np.sort(hashes)
    new = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def word_hashes(text: str, kind: str) -> Hashes:
    """A hash for each word of the text, in order; raises ValueError for an unknown kind."""
    rule = _rule(kind)
    values, starts = _ascii_words(text, rule) if text.isascii() else _unicode_words(text, rule)
    if not values.size:
        return np.empty(0, np.uint64)
    # Code may begin with punctuation, without a word before it.
    if starts.size == 0 or starts[0] != 0:
        starts = np.concatenate(([0], starts))
    ends = _ends(starts, values.size)
    if (ends - starts).max() > LONGEST_WORD:
        starts = _cut_long_words(starts, ends)
        ends = _ends(starts, values.size)
    return _hash_words(values, starts, ends)


def spelled_words(text: str) -> list[str]:
    """The words that `word_hashes` hashes by the rule for prose, as strings, after composition (NFC)."""
    table = character_table("words")
    words: list[list[str]] = []
    before = BETWEEN
    for char in unicodedata.normalize("NFC", text):
        code = min(ord(char), table.roles.size - 1)
        role = table.roles[code]
        if role == WORD and before == WORD and len(words[-1]) < LONGEST_WORD:
            words[-1].append(chr(table.values[code]))
        elif role in (WORD, ALONE):
            words.append([char if code == table.roles.size - 1 else chr(table.values[code])])
        before = role
    return ["".join(word) for word in words]


def shingles_of_words(hashes: Hashes, kind: str, words: int) -> Hashes:
    """The hash of every `words` consecutive words, given the hash of each word; of all words if there are fewer.

    The hash is a sum with an odd random factor for each position, then mixed. Kinds compared by different rules share
    no shingles.
    """
    count = min(words, hashes.size)
    if count == 0:
        return np.empty(0, np.uint64)
    factors = _random_odd("shingle", words)
    size = hashes.size - count + 1
    sums = hashes[:size] * factors[0]
    term = np.empty_like(sums)
    for place in range(1, count):
        np.multiply(hashes[place : place + size], factors[place], out=term)
        sums += term
    sums += _random_odd(_rule(kind), 1)[0]
    # A bijection in which every input bit reaches every output bit (after SplitMix64, Steele, Lea and Flood 2014).
    sums ^= sums >> _SHIFT
    sums *= _MIX_FIRST
    sums ^= sums >> _MIX_SHIFT
    sums *= _MIX_SECOND
    sums ^= sums >> _SHIFT
    return sums


def _rule(kind: str) -> Rule:
    try:
        return _RULES[kind]
    except KeyError:
        raise ValueError(f"unknown kind of document {kind!r}; the known kinds are {', '.join(_RULES)}") from None


def _ascii_words(text: str, rule: Rule) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The values of the characters of all words, and the starts of words among them."""
    table, data = character_table(rule, _ASCII_SIZE), text.encode("ascii")
    values = np.frombuffer(data.translate(table.ascii_values, table.ascii_between), np.uint8)
    roles = np.frombuffer(data.translate(table.ascii_roles), np.uint8)
    return values, _starts(roles, roles != 0)


def _unicode_words(text: str, rule: Rule) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Like `_ascii_words`, for text in any script."""
    table = character_table(rule)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    places = np.minimum(codes, table.roles.size - 1)
    roles = table.roles[places]
    within = roles != 0
    kept = places[within]
    values = table.values[kept]
    beyond = kept == table.roles.size - 1
    if beyond.any():
        values[beyond] = codes[within][beyond]
    return values, _starts(roles, within)


def _starts(roles: NDArray[np.uint8], within: NDArray[np.bool_]) -> NDArray[np.int64]:
    begins = roles == WORD
    begins[1:] &= roles[:-1] != WORD
    begins |= roles == ALONE
    return np.flatnonzero(begins[within])


def _ends(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    ends = np.empty_like(starts)
    ends[:-1], ends[-1] = starts[1:], size
    return ends


def _cut_long_words(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    pieces = -(-(ends - starts) // LONGEST_WORD)
    first = np.cumsum(pieces) - pieces
    number = np.arange(int(pieces.sum())) - np.repeat(first, pieces)
    return np.repeat(starts, pieces) + LONGEST_WORD * number


def _hash_words(
    values: NDArray[np.uint8] | NDArray[np.uint32], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Hashes:
    """Multilinear hashing: the sum of each character times a random odd factor for its position in the word, mod 2^64.

    Two words collide with probability at most 2^-57 for ASCII and 2^-43 otherwise, over the choice of the odd
    factors (Carter and Wegman 1979; Lemire and Kaser 2014, "Strongly universal string hashing is fast").
    """
    if values.size <= _BLOCK_CHARACTERS:
        return _hash_block(values, starts, ends)
    # Blocks of whole words, so that the arrays stay in the processor's cache.
    cuts = [*np.searchsorted(starts, np.arange(0, values.size, _BLOCK_CHARACTERS)).tolist(), starts.size]
    hashes = np.empty(starts.size, np.uint64)
    for first, last in pairwise(cuts):
        if first < last:
            begin, end = int(starts[first]), int(ends[last - 1])
            hashes[first:last] = _hash_block(values[begin:end], starts[first:last] - begin, ends[first:last] - begin)
    return hashes


def _hash_block(
    values: NDArray[np.uint8] | NDArray[np.uint32], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Hashes:
    places = np.arange(values.size)
    places -= starts.repeat(ends - starts)
    sums = _random_odd("character", LONGEST_WORD)[places]
    sums *= values
    # Differences of running sums are exact, because all of it is arithmetic modulo 2^64.
    np.cumsum(sums, out=sums)
    hashes = sums[ends - 1]
    hashes[1:] -= hashes[:-1].copy()
    return hashes


@cache
def _random_odd(purpose: str, count: int) -> Hashes:
    """Random odd factors, which must never change, because signatures of different builds are compared."""
    raw = np.random.Philox(key=derive_seed(0, "shingles", purpose)).random_raw(count)
    return np.asarray(raw, dtype=np.uint64) | np.uint64(1)
