"""Text as words and punctuation, cut where the rules of Gopher, C4 and FineWeb expect it, and what each character is.

Those rules count the tokens of spaCy's English tokenizer, and some of their thresholds lie where ordinary text lies.
Nearly the same counts come from a few rules: of each piece between white space the signs at both ends are taken off,
one by one; what is left is cut between letters at hyphens, slashes, commas and the like, and before 's. They are
applied to arrays of characters, which is a hundred times faster.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import regex

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]
Kinds = npt.NDArray[np.uint8]

# A kind is a sum of these. COUNTED are all but white space and what Gopher's rules count as punctuation; EDGE are signs
# that are cut off at either end of a piece of text; CUT may cut it before a letter, ARITHMETIC between digits.
SPACE, LETTER, DIGIT, COUNTED, EDGE, CUT, ARITHMETIC, APOSTROPHE = (1 << bit for bit in range(8))
_SIGNS = {
    EDGE: "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧—–§%=$£€¥₹",
    CUT: "-–—~:<>=/,",
    ARITHMETIC: "+-*^",
    APOSTROPHE: "'’",
}
ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")
"""Characters that may end a sentence in some script (Unicode Standard Annex 29)."""
# What the rules of Gopher count as no part of a word in their common implementation, datatrove's.
_IS_PUNCTUATION = regex.compile(
    r"[\p{Sentence_Terminal}\p{Control}!-/:-@\[-`{-~«»´–—’“”„…∶━►、〈〉《》「」【】％（），：；～\uff11]"
)
_DOT, _HYPHEN = ord("."), ord("-")
# So many spaces stand after the text, so that what follows a sign can be looked at without asking where the text ends.
_PADDING = 3

# Texts are worked on in parts of about so many characters, small enough to stay in the caches of a processor.
BLOCK_CHARACTERS = 2**17
_FACTORS = np.random.Philox(key=1).random_raw(256).astype(np.uint64) | np.uint64(1)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text in order: the length of each in characters, and what it is made of.

    `is_word` tells which are more than punctuation, `has_letter` which have a letter in them.
    """

    lengths: Ints
    is_word: Bools
    has_letter: Bools
    _places: tuple[tuple[Codes, Bools, Ints], ...]

    def hashes(self) -> Hashes:
        """A number of 64 bits for each token; equal tokens have equal numbers."""
        return np.concatenate([np.zeros(0, np.uint64), *(_hashes(*place) for place in self._places)])

    def __len__(self) -> int:
        return len(self.lengths)


def tokens_of(text: str) -> Tokens:
    """The tokens of the text."""
    parts = [_cut(part) for part in _parts(text)]
    if len(parts) == 1:
        return parts[0]
    lengths, is_word, has_letter = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "is_word", "has_letter")
    )
    return Tokens(lengths, is_word, has_letter, tuple(place for part in parts for place in part._places))


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > 2 * BLOCK_CHARACTERS:
        end = max(text.rfind(space, begin, begin + BLOCK_CHARACTERS) for space in "\n ") + 1
        end = end if end > begin else begin + BLOCK_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _cut(text: str) -> Tokens:
    codes, kinds = codes_and_kinds(f" {text}{' ' * _PADDING}")
    is_space, letter, digit = ((kinds & kind) != 0 for kind in (SPACE, LETTER, DIGIT))
    body = _bodies(codes, kinds, is_space, letter)
    either, hyphen = letter | digit, codes == _HYPHEN
    cut = either[:-2] & letter[2:] & ((kinds[1:-1] & CUT) != 0)
    cut |= digit[:-2] & digit[2:] & ((kinds[1:-1] & ARITHMETIC) != 0)
    dash = either[:-3] & hyphen[1:-2] & hyphen[2:-1] & letter[3:]
    cut[:-1] |= dash
    cut[1:] |= dash
    body[1:-1] &= ~cut
    goes_on = body[1:] & body[:-1]
    # Dots and hyphens in a row are one token.
    goes_on |= (codes[1:] == codes[:-1]) & (hyphen | (codes == _DOT))[1:]
    # "it's" and "don't" are two words: an apostrophe between letters, of which one or two follow.
    apostrophe = body[1:-3] & letter[:-4] & letter[2:-2] & ((kinds[1:-3] & APOSTROPHE) != 0)
    goes_on[:-3] &= ~(apostrophe & ~(letter[3:-1] & letter[4:]))
    begins = np.flatnonzero(~is_space[1:] & ~goes_on) + 1
    if not len(begins):
        return Tokens(begins, np.zeros(0, np.bool_), np.zeros(0, np.bool_), ())
    within = ~is_space
    made_of = np.bitwise_or.reduceat(kinds, begins)
    lengths = np.add.reduceat(within, begins, dtype=np.int64)
    return Tokens(lengths, (made_of & COUNTED) != 0, (made_of & LETTER) != 0, ((codes, within, begins),))


def _bodies(codes: Codes, kinds: Kinds, is_space: Bools, letter: Bools) -> Bools:
    """What is left of each piece between white space when the signs at its ends are taken off."""
    core = (kinds & (SPACE | EDGE)) == 0
    is_dot = codes == _DOT
    ends = core & ~is_dot
    # A dot after a single letter belongs to an abbreviation.
    ends[2:] |= is_dot[2:] & letter[1:-1] & ~ends[:-2]
    return _reached(core, is_space) & _reached(ends[::-1], is_space[::-1])[::-1]


def _reached(core: Bools, is_space: Bools) -> Bools:
    """Where one of `core` stands at or before the place and after the white space before it."""
    count = np.cumsum(core, dtype=np.int32)
    return count > np.maximum.accumulate(count * is_space)


def _hashes(codes: Codes, within: Bools, begins: Ints) -> Hashes:
    """For each token the sum of its characters, scattered, each times a factor for its place in the token."""
    sizes = np.append(begins[1:], len(codes)) - begins
    places = np.arange(len(codes) - begins[0]) - np.repeat(begins - begins[0], sizes)
    values = (codes[begins[0] :].astype(np.uint64) + np.uint64(0x9E37)) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(31)
    values *= _FACTORS.take(places & 255)
    values *= within[begins[0] :]
    return np.add.reduceat(values, begins - begins[0])


def codes_and_kinds(text: str) -> tuple[Codes, Kinds]:
    """The code points of `text`, and the kind of each."""
    if text.isascii():
        narrow = np.frombuffer(text.encode("ascii"), np.uint8)
        return narrow, _table(0x80).take(narrow)
    wide = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _table(0x10000).take(np.minimum(wide, 0xFFFF))
    beyond = np.flatnonzero(wide > 0xFFFF)
    kinds[beyond] = [_kind(chr(code)) for code in wide[beyond].tolist()]
    return wide, kinds


@cache
def _table(size: int) -> Kinds:
    table = np.fromiter((_kind(chr(code)) for code in range(size)), np.uint8, size)
    for kind, signs in _SIGNS.items():
        table[[ord(sign) for sign in signs if ord(sign) < size]] |= kind
    return table


def _kind(character: str) -> int:
    if character.isspace():
        return SPACE
    kind = COUNTED * (_IS_PUNCTUATION.match(character) is None)
    if character.isalpha():
        return kind | LETTER
    if "0" <= character <= "9":
        return kind | DIGIT
    return kind | (EDGE if unicodedata.category(character) == "So" else 0)
