"""Cuts texts into words and punctuation as the rules of Gopher, C4 and FineWeb expect, many texts at once.

Those rules count the tokens of spaCy's blank English pipeline, and ordinary text lies near some of their thresholds, so
a different tokenization would give different verdicts. This module applies the same published rules
(https://spacy.io/usage/linguistic-features#how-tokenizer-works) to whole arrays of characters, which takes 20 to 40 ns
per character, where a loop over the text takes 5,000. It splits text at white space, strips punctuation from both ends
of each piece, one sign at a time, keeps pieces that look like addresses, and cuts the rest at ellipses and, between
letters, at hyphens, slashes, commas and the like. Of spaCy's English exceptions it has n't, 's, 'll and similar ones,
and abbreviations of single letters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import regex

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint8]
Kinds = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]

# A kind is a sum of these bits. ENDS: signs that are cut off at either end of a piece; BEGINS: only at its beginning;
# INNER: may cut inside; WORD: all but white space and what Gopher's rules count as punctuation.
SPACE, LETTER, DIGIT, UPPER, ENDS, BEGINS, INNER, WORD = (1 << bit for bit in range(8))

_ENDS = frozenset("…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧—–")
_BEGINS = frozenset("§%=+$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿")
_INNER = frozenset(".,-–—~:<>=/+*^'’…")

ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")
"""Characters that may end a sentence in some script (Unicode Standard Annex 29)."""
# The punctuation of Gopher's rules in datatrove, their common implementation.
_IS_PUNCTUATION = regex.compile(
    r"[\p{Sentence_Terminal}\p{Control}!-/:-@\[-`{-~«»´–—’“”„…∶━►、〈〉《》「」【】％（），：；～\uff11]"
)

# The number of spaces before and after the text, so that neighbours can be read without bounds checks.
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


_DOT, _HYPHEN, _COMMA, _PLUS, _ELLIPSIS = (ord(sign) for sign in ".-,+…")
_BEFORE_DOT, _BETWEEN, _ARITHMETIC, _AFTER_DOMAIN, _APOSTROPHE, _SHORT, _AFTER_DIGIT = (1 << bit for bit in range(7))
_ROLES = ("%²-+|", "-–—~:<>=/", "+-*^", ":/?#", "'’", "sSdDmM", "+%$£€")


_ROLE: Bits = np.zeros(0x2100, np.uint8)
for _bit, _signs in enumerate(_ROLES):
    _ROLE[[ord(sign) for sign in _signs]] |= 1 << _bit


def _roles(codes: Codes) -> Bits:
    return _ROLE.take(codes if codes.dtype == np.uint8 else np.minimum(codes, len(_ROLE) - 1))


def beginnings_and_ends(codes: Codes, kinds: Kinds) -> tuple[Ints, Ints]:
    """The start and end (exclusive) of each token, as indices into the padded `codes`."""
    is_space = (kinds & SPACE) != 0
    pieces = np.flatnonzero(is_space[:-1] > is_space[1:]) + 1
    piece_ends = np.flatnonzero(is_space[:-1] < is_space[1:]) + 1
    begins_token = np.zeros(len(codes), np.bool_)
    begins_token[pieces] = True
    marks = _Marks.of(codes, kinds)
    if len(marks.at):
        first, last = marks.cut_first(), marks.cut_last()
        inner = ~(first | last)
        cut = marks.at[~inner | marks.cut_inside(inner, last, pieces)]
        begins_token[cut] = True
        begins_token[cut + 1] = True
        begins_token[marks.at[marks.continues]] = False
        begins_token[marks.contractions(inner, last, is_space)] = True
        begins_token &= ~is_space
    begins = np.flatnonzero(begins_token)
    # A token ends at the start of the next one or at the end of its piece, whichever is first.
    begins_piece = np.zeros(len(codes), np.bool_)
    begins_piece[pieces] = True
    piece = np.cumsum(begins_piece.take(begins), dtype=np.int32) - 1
    return begins, np.minimum(np.append(begins[1:], len(codes)), piece_ends.take(piece))


@dataclass(frozen=True)
class _Marks:
    """The signs of a text that may be cut off, with their positions, kinds and neighbours."""

    codes: Codes
    kinds: Kinds
    at: Ints
    code: Codes
    role: Bits
    kind: Kinds
    left: Kinds
    right: Kinds
    after_mark: Bools
    in_dots: Bools
    continues: Bools

    @classmethod
    def of(cls, codes: Codes, kinds: Kinds) -> _Marks:
        at = np.flatnonzero((kinds & (ENDS | BEGINS | INNER)) != 0)
        code = codes.take(at)
        after_mark = np.zeros(len(at), np.bool_)
        after_mark[1:] = at[1:] == at[:-1] + 1
        after_same = after_mark.copy()
        after_same[1:] &= code[1:] == code[:-1]
        after_dot = after_same & (code == _DOT)
        in_dots = after_dot.copy()
        in_dots[:-1] |= after_dot[1:]
        continues = after_dot | (after_same & (code == _HYPHEN))
        left, right = kinds.take(at - 1), kinds.take(at + 1)
        return cls(codes, kinds, at, code, _roles(code), kinds.take(at), left, right, after_mark, in_dots, continues)

    def cut_first(self) -> Bools:
        """Which marks are cut off at the beginning of a piece: those with only such marks before them."""
        can = (self.kind & (ENDS | BEGINS)) != 0
        can &= (self.code != _PLUS) | ((self.right & DIGIT) == 0)
        at_edge = (self.left & SPACE) != 0
        quotes = np.flatnonzero(at_edge & ((self.role & _APOSTROPHE) != 0))
        at = self.at.take(quotes)
        can[quotes] &= ((_roles(self.codes.take(at + 1)) & _SHORT) == 0) | ((self.kinds.take(at + 2) & SPACE) == 0)
        return _unbroken(at_edge, (can | self.in_dots) & (self.after_mark | at_edge))

    def cut_last(self) -> Bools:
        """Which marks are cut off at the end of a piece: those with only such marks after them."""
        can = (self.kind & ENDS) != 0
        can |= self.in_dots
        can |= ((self.role & _AFTER_DIGIT) != 0) & ((self.left & DIGIT) != 0)
        dots = np.flatnonzero(self.code == _DOT)
        can[dots] |= self._ends_sentence(dots)
        at_edge = (self.right & SPACE) != 0
        before_mark = np.append(self.after_mark[1:], False)
        return _unbroken(at_edge[::-1], (can & (before_mark | at_edge))[::-1])[::-1]

    def _ends_sentence(self, dots: Ints) -> Bools:
        """Whether each dot ends a sentence, not an abbreviation: it follows two letters, a digit or a sign."""
        at, left = self.at.take(dots), self.left.take(dots)
        before = self.kinds.take(at - 2)
        is_upper, is_letter = (left & UPPER) != 0, (left & LETTER) != 0
        alone = (before & (SPACE | ENDS)) != 0
        pair = (self.codes.take(at - 2) == _DOT) & ((self.kinds.take(at - 3) & LETTER) != 0)
        alone |= pair & ((self.kinds.take(at - 4) & (SPACE | ENDS)) != 0)
        after_sign = ((left & (DIGIT | ENDS)) != 0) | ((_roles(self.codes.take(at - 1)) & _BEFORE_DOT) != 0)
        return after_sign | (is_letter & np.where(is_upper, (before & UPPER) != 0, ~alone))

    def cut_inside(self, inner: Bools, last: Bools, pieces: Ints) -> Bools:
        """Which of the `inner` marks separate two tokens."""
        after_letter, before_letter = (self.left & LETTER) != 0, (self.right & LETTER) != 0
        after_digit = (self.left & DIGIT) != 0
        cut = ((self.role & _BETWEEN) != 0) & (after_letter | after_digit)
        cut |= (self.code == _COMMA) & after_letter
        cut &= before_letter
        cut |= (self.code == _DOT) & after_letter & ((self.left & UPPER) == 0) & ((self.right & UPPER) != 0)
        cut |= ((self.role & _ARITHMETIC) != 0) & after_digit & ((self.right & DIGIT) != 0)
        # Two hyphens between letters are cut out as one.
        second = np.flatnonzero(self.continues & (self.code == _HYPHEN) & before_letter)
        second = second[(after_letter | after_digit).take(second - 1)]
        cut[second] = True
        cut[second - 1] = True
        cut &= inner
        chosen = np.flatnonzero(cut)
        if len(chosen):
            cut[chosen] = ~self._in_address(chosen, inner, last, pieces)
        cut |= inner & (self.in_dots | (self.code == _ELLIPSIS))
        return cut

    def _in_address(self, chosen: Ints, inner: Bools, last: Bools, pieces: Ints) -> Bools:
        """Whether the piece of each mark contains a top-level domain, as addresses and module names do."""
        lower = LETTER | UPPER
        domain = inner & (self.code == _DOT) & ((self.left & (LETTER | DIGIT)) != 0) & ((self.right & lower) == LETTER)
        dots = np.flatnonzero(domain)
        dots = dots[(self.kinds.take(self.at.take(dots) + 2) & lower) == LETTER]
        piece = np.searchsorted(pieces, self.at.take(dots), "right")
        following = np.minimum(dots + 1, len(self.at) - 1)
        ends = np.append(pieces, len(self.codes)).take(piece)
        alone = (following == dots) | (self.at.take(following) >= ends)
        followed = last.take(following) | ((self.role.take(following) & _AFTER_DOMAIN) != 0)
        whole = np.zeros(len(pieces) + 1, np.bool_)
        whole[piece[alone | followed]] = True
        return whole.take(np.searchsorted(pieces, self.at.take(chosen), "right"))

    def contractions(self, inner: Bools, last: Bools, is_space: Bools) -> Ints:
        """The starts of the second words of contractions: n't, 's, 'll, 're, 've, 'd, 'm."""
        chosen = np.flatnonzero(inner & ((self.role & _APOSTROPHE) != 0) & ((self.left & LETTER) != 0))
        if not len(chosen):
            return chosen
        over = is_space.copy()
        over[self.at[last]] = True
        at = self.at.take(chosen)
        before, one, two = (self.codes.take(at + offset) | 32 for offset in (-1, 1, 2))
        negation = over.take(at + 2) & (before == ord("n")) & (one == ord("t"))
        short = over.take(at + 2) & ((_roles(self.codes.take(at + 1)) & _SHORT) != 0)
        have_or_are = (two == ord("e")) & ((one == ord("r")) | (one == ord("v")))
        long = over.take(at + 3) & (have_or_are | ((one == ord("l")) & (two == ord("l"))))
        return np.concatenate([at[negation] - 1, at[short | long]])


def _unbroken(edge: Bools, good: Bools) -> Bools:
    """Which positions are good together with all positions back to the last edge, inclusive."""
    order = np.arange(len(edge), dtype=np.int32)
    nearest_edge = np.maximum.accumulate(np.where(edge, order, -1))
    return nearest_edge > np.maximum.accumulate(np.where(good, -1, order))


Hashes = npt.NDArray[np.uint64]

# The approximate number of characters in a block: small enough for the processor's caches, large enough that the
# overhead of numpy calls does not matter.
BLOCK_CHARACTERS = 2**17


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text in order: lengths in characters, whether more than punctuation, and whether with letters."""

    lengths: Ints
    is_word: Bools
    has_letter: Bools
    _spans: tuple[tuple[Codes, Ints, Ints], ...]

    def hashes(self) -> Hashes:
        """A 64-bit hash for each token."""
        return np.concatenate([np.zeros(0, np.uint64), *(_hashes(*span) for span in self._spans)])

    def __len__(self) -> int:
        return len(self.lengths)


def tokens_of(text: str) -> Tokens:
    """The tokens of one text."""
    return tokens_of_all([text])[0]


def tokens_of_all(texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text."""
    spans: list[list[Tokens]] = [[] for _ in texts]
    for numbers, parts in _blocks(texts):
        for number, span in zip(numbers, _spans(parts), strict=True):
            spans[number].append(span)
    return [_joined(found) for found in spans]


def _joined(parts: list[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    lengths, is_word, has_letter = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "is_word", "has_letter")
    )
    return Tokens(lengths, is_word, has_letter, tuple(span for part in parts for span in part._spans))


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Groups texts, or parts of long ones; ASCII texts are separate, because others need wider arrays."""
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


def _spans(parts: list[str]) -> Iterator[Tokens]:
    codes, kinds = codes_and_kinds("\n".join(parts))
    begins, ends = beginnings_and_ends(codes, kinds)
    made_of = np.bitwise_or.reduceat(kinds, begins) if len(begins) else kinds[:0]
    is_word, has_letter = (made_of & WORD) != 0, (made_of & LETTER) != 0
    offsets = PADDING + np.cumsum([len(part) + 1 for part in parts[:-1]], dtype=np.int64)
    for first, last in pairwise([0, *np.searchsorted(begins, offsets).tolist(), len(begins)]):
        span = slice(first, last)
        begin, end = begins[span], ends[span]
        yield Tokens(end - begin, is_word[span], has_letter[span], ((codes, begin, end),))


def _hashes(codes: Codes, begins: Ints, ends: Ints) -> Hashes:
    """A hash of the codes of each token: a polynomial in an odd number, modulo 2**64."""
    if not len(begins):
        return np.zeros(0, np.uint64)
    first = int(begins[0])
    codes = codes[first : int(ends[-1])]
    powers = _powers()
    # Each character gets a scattered number, and each token is scaled to the same power, so that its position does not
    # matter.
    mixed = (codes.astype(np.uint64) + np.uint64(0x9E37)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(mixed, out=sums[1:])
    return (sums.take(ends - first) - sums.take(begins - first)) * powers.take(len(powers) - 1 - (begins - first))


@cache
def _powers() -> Hashes:
    return np.cumprod(np.full(2 * BLOCK_CHARACTERS + 1, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
