"""What each character is to the rules that judge text: letter, digit, white space, or a sign that may be cut off."""

from __future__ import annotations

import unicodedata
from functools import cache

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
