"""Text from right to left, whose letters a page holds in any order: their places tell how they are read."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from sheepop.data.extract.page_lines import RIGHT_TO_LEFT

_LEFT_TO_RIGHT = re.compile(r"[^\W\d_]")
# A run of the other direction: letters or numbers of it, with what stands between them.
_LEFT_RUN = re.compile("[^\\W_\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+(?:[^\\w\u0590-\u08ff]*"
                       "[^\\W_\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+)*")  # fmt: skip
_RIGHT = "[\u0590-\u065f\u066a-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]"
_RIGHT_RUN = re.compile(rf"{_RIGHT}+(?:[\W\d]*{_RIGHT}+)*")
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
# In multiples of the size of the letters.
_BLANK = 0.16
_CELL = 0.9


class Glyph(NamedTuple):
    """A character and the ends of its place along the line."""

    character: str
    left: float
    right: float


def visual_pieces(glyphs: Sequence[Glyph], size: float) -> list[Glyph]:
    """The pieces of a line, from left to right, each with its text as it is read and with its ends.

    Wide spaces part the pieces. Blanks are found by the distances between letters of `size`, so those among
    `glyphs` do not count. The order is the inverse of the Unicode bidirectional algorithm (UAX 9) for lines without
    explicit directions.
    """
    pieces: list[Glyph] = []
    for glyph in _clusters(glyphs):
        gap = glyph.left - pieces[-1].right if pieces else math.inf
        if gap > _CELL * size:
            pieces.append(glyph)
        else:
            text, left, right = pieces.pop()
            blank = " " if gap > _BLANK * size else ""
            pieces.append(Glyph(text + blank + glyph.character, left, max(right, glyph.right)))
    return [Glyph(logical(text), left, right) for text, left, right in pieces]


def logical(text: str) -> str:
    """Text in the order of its places, from left to right, in the order in which it is read."""
    rights = RIGHT_TO_LEFT.findall(text)
    if not rights:
        return text
    if len(rights) < len(_LEFT_TO_RIGHT.findall(text)) - len(rights):
        return _RIGHT_RUN.sub(lambda run: _NUMBER.sub(_turned, _turned(run)), text)
    return _LEFT_RUN.sub(_turned, _reversed(text))


def _turned(match: re.Match[str]) -> str:
    return _reversed(match.group())


def _reversed(text: str) -> str:
    """The characters in reverse, where marks stay behind the letter that they belong to."""
    groups: list[str] = []
    for character in text:
        if groups and unicodedata.combining(character):
            groups[-1] += character
        else:
            groups.append(character)
    return "".join(reversed(groups))


def _clusters(glyphs: Sequence[Glyph]) -> list[Glyph]:
    """Letters from left to right, each followed by the marks that stand over or under it."""
    letters = [glyph for glyph in _ligatures(glyphs) if not (_is_mark(glyph) or glyph.character.isspace())]
    marks = sorted(filter(_is_mark, glyphs), key=_middle)
    if not letters:
        return marks
    letters.sort(key=_middle)
    bounds = [(_middle(one) + _middle(other)) / 2 for one, other in pairwise(letters)]
    texts = [letter.character for letter in letters]
    for mark in marks:
        texts[bisect_left(bounds, _middle(mark))] += mark.character
    return [letter._replace(character=text) for text, letter in zip(texts, letters, strict=True)]


def _ligatures(glyphs: Sequence[Glyph]) -> list[Glyph]:
    """The glyphs, where letters from right to left that share a place are one glyph, spelt from left to right."""
    found: list[Glyph] = []
    for place, group in groupby(glyphs, key=lambda glyph: glyph[1:]):
        text = "".join(glyph.character for glyph in group)
        if RIGHT_TO_LEFT.search(text):
            text = unicodedata.normalize("NFKC", text)[::-1]
        found.append(Glyph(text, *place))
    return found


def _is_mark(glyph: Glyph) -> bool:
    return unicodedata.combining(glyph.character[0]) > 0


def _middle(glyph: Glyph) -> float:
    return (glyph.left + glyph.right) / 2
