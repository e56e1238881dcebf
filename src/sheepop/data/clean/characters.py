"""What each character is to the rules that judge text (letter, digit, white space, a sign that may be cut off), and how
many of each a text has: the figures by which garbage is told from text.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import regex

Codes = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]
Kinds = npt.NDArray[np.uint8]

# A kind is a sum of these. ENDS are signs that are cut off at either end of a piece of text, BEGINS only at its
# beginning; INNER may cut inside; WORD are all but white space and those that Gopher's rules count as punctuation.
SPACE, LETTER, DIGIT, UPPER, ENDS, BEGINS, INNER, WORD = (1 << bit for bit in range(8))

_ENDS = frozenset("…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧—–")
_BEGINS = frozenset("§%=+$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿")
_INNER = frozenset(".,-–—~:<>=/+*^'’…")

ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")
"""Characters that may end a sentence in some script (Unicode Standard Annex 29)."""
# What the rules of Gopher count as no part of a word in their common implementation, datatrove's.
_IS_PUNCTUATION = regex.compile(
    r"[\p{Sentence_Terminal}\p{Control}!-/:-@\[-`{-~«»´–—’“”„…∶━►、〈〉《》「」【】％（），：；～\uff11]"
)

# So many spaces stand before and after the text, so that neighbours can be looked at without asking where it ends.
PADDING = 4


def codes_and_kinds(text: str) -> tuple[Codes, Kinds]:
    """The code points of `text`, padded with spaces, and the kind of each."""
    padded = f"{' ' * PADDING}{text}{' ' * PADDING}"
    if padded.isascii():
        narrow = np.frombuffer(padded.encode("ascii"), np.uint8)
        return narrow, _table(0x80).take(narrow)
    wide = np.frombuffer(padded.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _table(0x10000).take(np.minimum(wide, 0xFFFF))
    beyond = np.flatnonzero(wide > 0xFFFF)
    kinds[beyond] = [_kind(chr(code)) for code in wide[beyond].tolist()]
    return wide, kinds


@cache
def _table(size: int) -> Kinds:
    return np.fromiter((_kind(chr(code)) for code in range(size)), np.uint8, size)


def _kind(character: str) -> int:
    if character.isspace():
        return SPACE
    kind = 0 if _IS_PUNCTUATION.match(character) else WORD
    if character.isalpha():
        is_upper = character.isupper() or unicodedata.category(character) == "Lt"
        return kind | LETTER | (UPPER if is_upper else 0)
    if "0" <= character <= "9":
        return kind | DIGIT
    if character in _ENDS or unicodedata.category(character) == "So":
        kind |= ENDS
    return kind | (BEGINS if character in _BEGINS else 0) | (INNER if character in _INNER else 0)


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
