"""Where the tokens of a text begin and end, by the rules of spaCy's English tokenizer, for all its characters at once.

The rules (https://spacy.io/usage/linguistic-features#how-tokenizer-works): of each piece between white space,
punctuation is taken off at both ends, one sign at a time; a piece that looks like an address stays whole; the rest is
cut at ellipses, and between letters at hyphens, slashes, commas and the like. Of the list of English exceptions
remain n't, 's, 'll and their kin, and abbreviations of single letters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sheepop.data.clean.characters import BEGINS, DIGIT, ENDS, INNER, LETTER, SPACE, UPPER, Codes, Kinds

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint8]

_DOT, _HYPHEN, _COMMA, _PLUS, _ELLIPSIS = (ord(sign) for sign in ".-,+…")
_BEFORE_DOT, _BETWEEN, _ARITHMETIC, _AFTER_DOMAIN, _APOSTROPHE, _SHORT, _AFTER_DIGIT = (1 << bit for bit in range(7))
_ROLES = ("%²-+|", "-–—~:<>=/", "+-*^", ":/?#", "'’", "sSdDmM", "+%$£€")


def _role_table() -> Bits:
    table = np.zeros(0x2100, np.uint8)
    for bit, signs in enumerate(_ROLES):
        table[[ord(sign) for sign in signs]] |= 1 << bit
    return table


_ROLE = _role_table()


def _roles(codes: Codes) -> Bits:
    return _ROLE.take(codes if codes.dtype == np.uint8 else np.minimum(codes, len(_ROLE) - 1))


def beginnings_and_ends(codes: Codes, kinds: Kinds) -> tuple[Ints, Ints]:
    """Where each token begins, and where it ends (exclusive), as indices into the padded `codes`."""
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
    # A token ends where the next begins, or before it where its piece ends.
    begins_piece = np.zeros(len(codes), np.bool_)
    begins_piece[pieces] = True
    piece = np.cumsum(begins_piece.take(begins), dtype=np.int32) - 1
    return begins, np.minimum(np.append(begins[1:], len(codes)), piece_ends.take(piece))


@dataclass(frozen=True)
class _Marks:
    """The signs of a text that may be cut off: what they are, and what stands next to them."""

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
        """Which are cut off at the beginning of a piece: those before which there are only such."""
        can = (self.kind & (ENDS | BEGINS)) != 0
        can &= (self.code != _PLUS) | ((self.right & DIGIT) == 0)
        at_edge = (self.left & SPACE) != 0
        quotes = np.flatnonzero(at_edge & ((self.role & _APOSTROPHE) != 0))
        at = self.at.take(quotes)
        can[quotes] &= ((_roles(self.codes.take(at + 1)) & _SHORT) == 0) | ((self.kinds.take(at + 2) & SPACE) == 0)
        return _unbroken(at_edge, (can | self.in_dots) & (self.after_mark | at_edge))

    def cut_last(self) -> Bools:
        """Which are cut off at the end of a piece: those after which there are only such."""
        can = (self.kind & ENDS) != 0
        can |= self.in_dots
        can |= ((self.role & _AFTER_DIGIT) != 0) & ((self.left & DIGIT) != 0)
        dots = np.flatnonzero(self.code == _DOT)
        can[dots] |= self._ends_sentence(dots)
        at_edge = (self.right & SPACE) != 0
        before_mark = np.append(self.after_mark[1:], False)
        return _unbroken(at_edge[::-1], (can & (before_mark | at_edge))[::-1])[::-1]

    def _ends_sentence(self, dots: Ints) -> Bools:
        """Whether a dot ends a sentence, not an abbreviation: it follows two letters, a digit or a sign."""
        at, left = self.at.take(dots), self.left.take(dots)
        before = self.kinds.take(at - 2)
        is_upper, is_letter = (left & UPPER) != 0, (left & LETTER) != 0
        alone = (before & (SPACE | ENDS)) != 0
        pair = (self.codes.take(at - 2) == _DOT) & ((self.kinds.take(at - 3) & LETTER) != 0)
        alone |= pair & ((self.kinds.take(at - 4) & (SPACE | ENDS)) != 0)
        after_sign = ((left & (DIGIT | ENDS)) != 0) | ((_roles(self.codes.take(at - 1)) & _BEFORE_DOT) != 0)
        return after_sign | (is_letter & np.where(is_upper, (before & UPPER) != 0, ~alone))

    def cut_inside(self, inner: Bools, last: Bools, pieces: Ints) -> Bools:
        """Which of the `inner` marks stand between two tokens."""
        after_letter, before_letter = (self.left & LETTER) != 0, (self.right & LETTER) != 0
        after_digit = (self.left & DIGIT) != 0
        cut = ((self.role & _BETWEEN) != 0) & (after_letter | after_digit)
        cut |= (self.code == _COMMA) & after_letter
        cut &= before_letter
        cut |= (self.code == _DOT) & after_letter & ((self.left & UPPER) == 0) & ((self.right & UPPER) != 0)
        cut |= ((self.role & _ARITHMETIC) != 0) & after_digit & ((self.right & DIGIT) != 0)
        self._add_dashes(cut, after_letter | after_digit)
        cut &= inner
        chosen = np.flatnonzero(cut)
        if len(chosen):
            cut[chosen] = ~self._in_address(chosen, inner, last, pieces)
        cut |= inner & (self.in_dots | (self.code == _ELLIPSIS))
        return cut

    def _add_dashes(self, cut: Bools, after_either: Bools) -> None:
        """Two hyphens between letters are cut out as one."""
        second = np.flatnonzero(self.continues & (self.code == _HYPHEN) & ((self.right & LETTER) != 0))
        second = second[after_either.take(second - 1)]
        cut[second] = True
        cut[second - 1] = True

    def _in_address(self, chosen: Ints, inner: Bools, last: Bools, pieces: Ints) -> Bools:
        """Whether the piece has a top-level domain in it, as addresses have, and names of modules."""
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
        """Where the second words of contractions begin: n't, 's, 'll, 're, 've, 'd, 'm."""
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
    """Which places are good back to and including the last edge."""
    order = np.arange(len(edge), dtype=np.int32)
    nearest_edge = np.maximum.accumulate(np.where(edge, order, -1))
    return nearest_edge > np.maximum.accumulate(np.where(good, -1, order))
