"""What a text is made of, in characters and lines: the figures by which garbage is told from text."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sheepop.data.clean.characters import DIGIT, LETTER, PADDING, SPACE, codes_and_kinds

LONG_LINE = 1000
# For shorter texts deleting characters is faster than working on arrays.
_SHORT = 4096
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_CONTROLS = bytes(code for code in range(128) if not chr(code).isprintable() and not chr(code).isspace())
_SHORTEST_ENCODED = 60
_FEWEST_SIGNS = 12
_ENCODED = re.compile(rb"(?=[A-Za-z+/]*[0-9])[A-Za-z0-9+/]+={0,2}")
_EDGES = b"'\"`,;:()[]{}\\<>"


@dataclass(frozen=True, slots=True)
class CharacterCounts:
    """Numbers of characters: all, those that are not white space, letters, ASCII digits, and those without a form."""

    characters: int
    visible: int
    letters: int
    digits: int
    unprintable: int

    @classmethod
    def of(cls, text: str) -> CharacterCounts:
        """Counts the characters of `text`."""
        if text.isascii() and len(text) < _SHORT:
            return _of_short(text.encode("ascii"))
        return _of_any(text)


def _of_short(data: bytes) -> CharacterCounts:
    """Bytes that are deleted and no longer there have been counted, the most frequent first."""
    sizes, rest = [len(data)], data
    for group in (_LETTERS, _SPACES, _DIGITS, _CONTROLS):
        rest = rest.translate(None, group)
        sizes.append(len(rest))
    letters, spaces, digits, unprintable = (before - after for before, after in pairwise(sizes))
    return CharacterCounts(len(data), len(data) - spaces, letters, digits, unprintable)


def _of_any(text: str) -> CharacterCounts:
    codes, kinds = codes_and_kinds(text)
    spaces = int(np.count_nonzero(kinds & SPACE)) - 2 * PADDING
    unprintable = ((codes < 0x20) & ((kinds & SPACE) == 0)) | (codes == 0x7F)
    # The codes of ASCII text are bytes, which cannot be compared with what is larger.
    if not text.isascii():
        unprintable |= (codes >= 0x80) & (codes < 0xA0) & (codes != 0x85)
        # The replacement character, what is left to private agreement, and what Unicode says is no character.
        unprintable |= (codes == 0xFFFD) | ((codes >= 0xE000) & (codes < 0xF900)) | ((codes & 0xFFFE) == 0xFFFE)
    letters, digits = int(np.count_nonzero(kinds & LETTER)), int(np.count_nonzero(kinds & DIGIT))
    return CharacterCounts(len(text), len(text) - spaces, letters, digits, int(np.count_nonzero(unprintable)))


def encoded_characters(text: str) -> int:
    """Characters in words of base64 or hexadecimal data, of `_SHORTEST_ENCODED` characters and more."""
    data = text.encode("utf-8", "surrogatepass")
    blanks = np.flatnonzero(np.frombuffer(b" " + data + b" ", np.uint8) <= ord(" "))
    lengths = np.diff(blanks) - 1
    total = 0
    for place in np.flatnonzero(lengths >= _SHORTEST_ENCODED).tolist():
        begin = int(blanks[place])
        word = data[begin : begin + int(lengths[place])].strip(_EDGES)
        if len(word) >= _SHORTEST_ENCODED and _ENCODED.fullmatch(word) and len(set(word)) >= _FEWEST_SIGNS:
            total += len(word)
    return total


def characters_in_long_lines(lines: Sequence[str]) -> int:
    """Characters in lines of more than `LONG_LINE`."""
    return sum(len(line) for line in lines if len(line) > LONG_LINE)
