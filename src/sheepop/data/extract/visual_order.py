"""Text from right to left, whose letters a page holds in any order: their places tell how they are read."""

from __future__ import annotations

import re
import unicodedata
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
    pieces: list[list[str | float]] = []
    for text, left, right in _clusters(glyphs):
        gap = left - float(pieces[-1][2]) if pieces else 2 * _CELL * size
        if gap > _CELL * size:
            pieces.append([text, left, right])
        else:
            pieces[-1][0] = f"{pieces[-1][0]}{' ' if gap > _BLANK * size else ''}{text}"
            pieces[-1][2] = max(right, float(pieces[-1][2]))
    return [Glyph(logical(str(text)), float(left), float(right)) for text, left, right in pieces]


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
    letters = [glyph for glyph in _ligatures(glyphs) if not _is_mark(glyph) and not glyph.character.isspace()]
    marks = sorted(filter(_is_mark, glyphs), key=_middle)
    if not letters:
        return marks
    letters.sort(key=_middle)
    bounds = [(_middle(one) + _middle(other)) / 2 for one, other in pairwise(letters)] + [float("inf")]
    texts = [letter.character for letter in letters]
    place = 0
    for mark in marks:
        while _middle(mark) > bounds[place]:
            place += 1
        texts[place] += mark.character
    return [Glyph(text, letter.left, letter.right) for text, letter in zip(texts, letters, strict=True)]


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
