"""What each character is to the comparison of documents: part of a word, a word by itself, or between words."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["words", "tokens"]

# BETWEEN words, WORD: part of one, ALONE: a word by itself, ATTACHED: belongs to the word before it, and ends it.
BETWEEN, WORD, ALONE, ATTACHED = range(4)

# Every later plane holds ideographs, private characters or nothing; all of it is taken as ideographs.
_TABLE_SIZE = 0x20000
_LETTERS_NUMBERS_MARKS = ("L", "N", "M")
# Scripts written without spaces: Thai, Lao, Myanmar, Khmer; kana, bopomofo and ideographs with their extensions.
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3021, 0x312F),
    (0x3190, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xA9E0, 0xA9FE),
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x16FE0, 0x18D8F),
    (0x1AFF0, 0x1B2FF),
)


@dataclass(frozen=True, slots=True)
class CharacterTable:
    """The role of every character, and the number by which it counts; by code point, and the ASCII part as bytes."""

    roles: NDArray[np.uint8]
    values: NDArray[np.uint32]
    ascii_roles: bytes
    ascii_values: bytes
    ascii_between: bytes


@cache
def character_table(rule: Rule) -> CharacterTable:
    """The table of a rule.

    ``words``: letters, digits and marks make words, in lower case; all else stands between them. ``tokens``: case
    counts, the underscore is a letter, and punctuation belongs to the word before it; only white space and controls
    stand between. In both, a character of a script without spaces is a word by itself.
    """
    roles, values = np.zeros(_TABLE_SIZE, np.uint8), np.arange(_TABLE_SIZE, dtype=np.uint32)
    for code in range(_TABLE_SIZE):
        character = chr(code)
        roles[code] = _role(character, rule)
        lowered = character.lower()
        if rule == "words" and len(lowered) == 1:
            values[code] = ord(lowered)
    for first, last in _WITHOUT_SPACES:
        script = roles[first : last + 1]
        script[script == WORD] = ALONE
    roles[-1] = ALONE
    between = [code for code in range(128) if roles[code] == BETWEEN]
    padding = bytes(128)
    return CharacterTable(
        roles, values, roles[:128].tobytes() + padding, bytes(values[:128].tolist()) + padding, bytes(between)
    )


def _role(character: str, rule: Rule) -> int:
    category = unicodedata.category(character)
    if category[0] in _LETTERS_NUMBERS_MARKS or (rule == "tokens" and character == "_"):
        return WORD
    if rule == "words" or category[0] in ("Z", "C"):
        return BETWEEN
    return ATTACHED
