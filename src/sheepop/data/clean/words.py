"""Text as words and punctuation, cut where the rules of Gopher, C4 and FineWeb expect it, many texts at once.

Those rules count the tokens of spaCy's blank English pipeline, and some of their thresholds lie where ordinary text
lies, so that words cut otherwise give other verdicts. `sheepop.data.clean.cuts` applies the same published rules to
whole arrays of characters, which takes 20 to 40 ns a character where going through the text takes 5,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sheepop.data.clean.characters import LETTER, PADDING, WORD, Codes, codes_and_kinds
from sheepop.data.clean.cuts import Bools, Ints, beginnings_and_ends

Hashes = npt.NDArray[np.uint64]

# Texts are worked on in blocks of about so many characters: small enough to stay in the caches of a processor, large
# enough that what a call of numpy costs does not count.
BLOCK_CHARACTERS = 2**17


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text in order: the length of each in characters, and what it is made of.

    `is_word` tells which are more than punctuation, `has_letter` which have a letter in them.
    """

    lengths: Ints
    is_word: Bools
    has_letter: Bools
    _spans: tuple[tuple[Codes, Ints, Ints], ...]

    def hashes(self) -> Hashes:
        """A number of 64 bits for each token; equal tokens have equal numbers."""
        return np.concatenate([np.zeros(0, np.uint64), *(_hashes(*span) for span in self._spans)])

    def __len__(self) -> int:
        return len(self.lengths)


def tokens_of(text: str) -> Tokens:
    """The tokens of one text."""
    return tokens_of_all([text])[0]


def tokens_of_all(texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text."""
    spans: list[list[_Span]] = [[] for _ in texts]
    for numbers, parts in _blocks(texts):
        for number, span in zip(numbers, _spans(parts), strict=True):
            spans[number].append(span)
    return [_joined(found) for found in spans]


@dataclass(frozen=True, slots=True)
class _Span:
    codes: Codes
    begins: Ints
    ends: Ints
    is_word: Bools
    has_letter: Bools


def _joined(spans: list[_Span]) -> Tokens:
    codes = tuple((span.codes, span.begins, span.ends) for span in spans)
    if len(spans) == 1:
        return Tokens(spans[0].ends - spans[0].begins, spans[0].is_word, spans[0].has_letter, codes)
    return Tokens(
        np.concatenate([span.ends - span.begins for span in spans]),
        np.concatenate([span.is_word for span in spans]),
        np.concatenate([span.has_letter for span in spans]),
        codes,
    )


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """The texts, or parts of long ones, in groups; characters beyond ASCII take more room, so they are kept apart."""
    for wanted in (True, False):
        numbers: list[int] = []
        parts: list[str] = []
        size = 0
        for number, text in enumerate(texts):
            if text.isascii() is not wanted:
                continue
            for part in _parts(text):
                numbers.append(number)
                parts.append(part)
                size += len(part)
                if size >= BLOCK_CHARACTERS:
                    yield numbers, parts
                    numbers, parts, size = [], [], 0
        if numbers:
            yield numbers, parts


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > 2 * BLOCK_CHARACTERS:
        end = max(text.rfind(space, begin, begin + BLOCK_CHARACTERS) for space in "\n ") + 1
        end = end if end > begin else begin + BLOCK_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _spans(parts: list[str]) -> Iterator[_Span]:
    codes, kinds = codes_and_kinds("\n".join(parts))
    begins, ends = beginnings_and_ends(codes, kinds)
    made_of = np.bitwise_or.reduceat(kinds, begins) if len(begins) else kinds[:0]
    is_word, has_letter = (made_of & WORD) != 0, (made_of & LETTER) != 0
    offsets = PADDING + np.cumsum([len(part) + 1 for part in parts[:-1]], dtype=np.int64)
    places = [0, *np.searchsorted(begins, offsets).tolist(), len(begins)]
    for first, last in pairwise(places):
        yield _Span(codes, begins[first:last], ends[first:last], is_word[first:last], has_letter[first:last])


def _hashes(codes: Codes, begins: Ints, ends: Ints) -> Hashes:
    """For the codes between each beginning and end a polynomial in an odd number, modulo 2**64."""
    if not len(begins):
        return np.zeros(0, np.uint64)
    first = int(begins[0])
    codes = codes[first : int(ends[-1])]
    powers = _powers()
    # A scattered number for each character; and each token moved to the same power, so that only its content counts.
    mixed = (codes.astype(np.uint64) + np.uint64(0x9E37)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(mixed, out=sums[1:])
    return (sums.take(ends - first) - sums.take(begins - first)) * powers.take(len(powers) - 1 - (begins - first))


@cache
def _powers() -> Hashes:
    return np.cumprod(np.full(2 * BLOCK_CHARACTERS + 1, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
