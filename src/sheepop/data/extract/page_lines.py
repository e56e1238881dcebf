"""Puts the lines of a page in reading order; the white gutters between columns show where columns are.

A file may store the letters of right-to-left lines in any order, so their positions decide how they are read.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import NamedTuple, TypeVar

RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_WORD = re.compile(r"\w")
# A page with more lines than this is a drawing or an attack, and is read from top to bottom.
_MOST_LINES_IN_COLUMNS = 1500
_DEEPEST_COLUMNS = 6
_GUTTER_STEPS = 400
_MOST_PEAKS = 4
_LEAST_AGREEMENT = 0.6
_MOST_PIECES = 20
_CELL_GAP = 1.8
_LEAST_COLUMN_ROWS = 3
_LEAST_COLUMN_CHARACTERS = 15
_LEAST_UNALIGNED_CHARACTERS = 8

_LEFT_TO_RIGHT = re.compile(r"[^\W\d_]")
# A run in the other direction: its letters or numbers and the characters between them.
_LEFT_RUN = re.compile("[^\\W_\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+(?:[^\\w\u0590-\u08ff]*"
                       "[^\\W_\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+)*")  # fmt: skip
_RIGHT = "[\u0590-\u065f\u066a-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]"
_RIGHT_RUN = re.compile(rf"{_RIGHT}+(?:[\W\d]*{_RIGHT}+)*")
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
# In multiples of the size of the letters; a wide gap separates columns or cells.
_BLANK = 0.16
WIDE_GAP = 0.9

T = TypeVar("T")


class Line(NamedTuple):
    """Text on one line and its position: y grows downwards, and all lengths have one unit, points or pixels.

    `size` is the height of its letters (in a PDF, the font size), `first_width` the width of its first word. A `rigid`
    line is a separate block with fixed text, such as a table.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    size: float
    first_width: float
    rigid: bool = False

    @property
    def height(self) -> float:
        """The distance from the upper to the lower edge."""
        return self.bottom - self.top

    def overlap(self, other: Line) -> float:
        """Returns how much two lines overlap vertically; negative if one is above the other."""
        return min(self.bottom, other.bottom) - max(self.top, other.top)


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was read: its number from 1, its height and its lines.

    `others` are lines in other directions than most. `confidence` is the mean confidence of recognition over the
    characters, from 0 to 1, and None for text that the file contains. `meaningless` counts characters without a known
    meaning, `unsure` counts lines that recognition was not sure of. `is_unsearched` says that the page was too complex
    to search for tables.
    """

    number: int
    height: float
    lines: Sequence[Line]
    others: Sequence[Line] = ()
    tables: int = 0
    meaningless: int = 0
    is_unsearched: bool = False
    confidence: float | None = None
    unsure: int = 0


def runs(items: Iterable[T], continues: Callable[[list[T], T], bool]) -> list[list[T]]:
    """Splits items into runs; `continues(run, item)` tells whether an item belongs to the current run."""
    found: list[list[T]] = []
    for item in items:
        if found and continues(found[-1], item):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def is_right_to_left(lines: Iterable[Line]) -> bool:
    """Returns whether most letters belong to scripts that are written from right to left."""
    text = "".join(line.text for line in lines)
    return 2 * len(RIGHT_TO_LEFT.findall(text)) > len(_WORD.findall(text))


def mirrored(lines: Iterable[Line]) -> list[Line]:
    """Mirrors the lines horizontally, so that right-to-left pages can be handled like left-to-right ones."""
    return [line._replace(left=-line.right, right=-line.left) for line in lines]


def reading_blocks(lines: Sequence[Line], depth: int = _DEEPEST_COLUMNS) -> list[list[Line]]:
    """Returns blocks, such as columns, of left-to-right or mirrored lines in reading order; joins pieces of a row."""
    ordered = sorted(lines, key=lambda line: (line.top + line.bottom, line.left))
    gutter = _gutter(lines) if depth else None
    if gutter is None:
        # Pieces at the same height are one line.
        rows = [_joined(sorted(row, key=lambda line: line.left)) for row in runs(ordered, _is_on_row)]
        return [rows] if rows else []
    # From top to bottom, bands of lines that cross the gutter alternate with bands of columns.
    begin, end = _ends(lines)
    reach_left, reach_right = gutter - (gutter - begin) / 20, gutter + (end - gutter) / 20
    walls = [line for line in lines if line.left < reach_left and line.right > reach_right]
    blocks: list[list[Line]] = []
    for is_across, group in groupby(
        ordered, lambda line: any(line.overlap(wall) > 0.5 * min(line.height, wall.height) for wall in walls)
    ):
        band = list(group)
        left = [line for line in band if is_across or line.left + line.right < 2 * gutter]
        right = [line for line in band if not is_across and line.left + line.right >= 2 * gutter]
        blocks += reading_blocks(left, depth - 1) + reading_blocks(right, depth - 1)
    return blocks


def _ends(lines: Iterable[Line]) -> tuple[float, float]:
    """Returns the leftmost and the rightmost x of the lines."""
    return min(line.left for line in lines), max(line.right for line in lines)


def _gutter(lines: Sequence[Line]) -> float | None:
    """Returns the x of the white gutter between two columns of running text, or None if there is none.

    Each pair of horizontal neighbours votes for the space between them. Table cells have such spaces too; columns
    differ from them by longer lines that fill the width, or by lines that are not level.
    """
    if not 2 * _LEAST_COLUMN_ROWS <= len(lines) <= _MOST_LINES_IN_COLUMNS:
        return None
    pairs = _neighbours(lines)
    begin, end = _ends(lines)
    if len(pairs) < _LEAST_COLUMN_ROWS or end <= begin:
        return None
    step = (end - begin) / _GUTTER_STEPS
    votes = [0] * (_GUTTER_STEPS + 2)
    for left, right in pairs:
        votes[max(0, int((left.right - begin) / step) + 1)] += 1
        votes[max(0, int((right.left - begin) / step))] -= 1
    for gutter in _peaks(votes):
        position = begin + gutter * step
        if _are_columns([(left, right) for left, right in pairs if left.right <= position <= right.left]):
            return position
    return None


def _peaks(votes: list[int]) -> list[float]:
    """Returns the positions with most votes, those nearest to the middle first; `votes` has differences of counts.

    The middle decides because labels in the margin of a column get almost as many votes as a gutter.
    """
    levels = [(0, 0), *((count, len(list(group))) for count, group in groupby(accumulate(votes))), (0, 0)]
    found, place = [], 0
    for (before, _), (count, length), (after, _) in zip(levels, levels[1:], levels[2:], strict=False):
        if count >= _LEAST_COLUMN_ROWS and before < count > after:
            found.append((-count, place + length / 2))
        place += length
    strongest = sorted(found)[:_MOST_PEAKS]
    middles = [middle for count, middle in strongest if count <= _LEAST_AGREEMENT * strongest[0][0]]
    return sorted(middles, key=lambda middle: (abs(middle - _GUTTER_STEPS / 2), middle))


def _neighbours(lines: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Returns each line with its right neighbour at about the same height, if a visible space separates them."""
    nearest: dict[int, tuple[Line, Line]] = {}
    active: list[Line] = []
    for line in sorted((line for line in lines if not line.rigid), key=lambda line: line.top):
        active = [other for other in active if other.bottom > line.top]
        for other in active:
            if other.overlap(line) >= 0.3 * min(other.size, line.size):
                left, right = (other, line) if other.left < line.left else (line, other)
                known = nearest.get(id(left))
                if known is None or right.left < known[1].left:
                    nearest[id(left)] = left, right
        active.append(line)
    pairs = nearest.values()
    return [(left, right) for left, right in pairs if right.left - left.right >= 0.5 * min(left.size, right.size)]


def _are_columns(pairs: list[tuple[Line, Line]]) -> bool:
    if len(pairs) < _LEAST_COLUMN_ROWS:
        return False
    sides = [list({id(line): line for line in side}.values()) for side in zip(*pairs, strict=True)]
    length = min(median(len(line.text) for line in side) for side in sides)
    unaligned = sum(abs(left.bottom - right.bottom) > 0.15 * left.size for left, right in pairs)
    if 2 * unaligned > len(pairs):
        return length >= _LEAST_UNALIGNED_CHARACTERS
    return length >= _LEAST_COLUMN_CHARACTERS and all(map(_fills, sides))


def _fills(side: list[Line]) -> bool:
    """Returns whether at least half of the lines reach about as far to the right as the longest."""
    begin, end = _ends(side)
    return 2 * sum(line.right >= end - 0.15 * (end - begin) for line in side) >= len(side)


def _is_on_row(row: list[Line], line: Line) -> bool:
    """Returns whether a line is at the height of the largest piece of a row; sub- and superscripts are."""
    row = row[-_MOST_PIECES:]
    largest = max(row, key=lambda piece: piece.size)
    if line.rigid or largest.rigid or largest.overlap(line) < 0.5 * min(largest.height, line.height):
        return False
    # Pieces that overlap horizontally are lines above each other, however close.
    return all(min(piece.right, line.right) - max(piece.left, line.left) < 0.5 * line.size for piece in row)


def _joined(row: list[Line]) -> Line:
    if len(row) == 1:
        return row[0]
    text = row[0].text
    for before, line in pairwise(row):
        gap = (line.left - before.right) / max(before.size, line.size)
        text += ("   " if gap > _CELL_GAP else " " if gap > 0.12 else "") + line.text
    top, bottom = min(line.top for line in row), max(line.bottom for line in row)
    size = max(row, key=lambda line: len(line.text)).size
    return Line(text, row[0].left, top, _ends(row)[1], bottom, size, row[0].first_width)


class Glyph(NamedTuple):
    """A character or text, and its left and right end along the line."""

    character: str
    left: float
    right: float


def visual_pieces(glyphs: Sequence[Glyph], size: float) -> list[Glyph]:
    """Returns the pieces of a line, from left to right, with their text in reading order and their ends.

    Wide spaces separate the pieces. Blanks are derived from the distances between letters of `size`; blanks among
    `glyphs` are ignored. The order inverts the Unicode bidirectional algorithm (UAX 9) without explicit directions.
    """
    pieces: list[Glyph] = []
    for glyph in _clusters(glyphs):
        gap = glyph.left - pieces[-1].right if pieces else math.inf
        if gap > WIDE_GAP * size:
            pieces.append(glyph)
        else:
            text, left, right = pieces.pop()
            blank = " " if gap > _BLANK * size else ""
            pieces.append(Glyph(text + blank + glyph.character, left, max(right, glyph.right)))
    return [Glyph(logical(text), left, right) for text, left, right in pieces]


def logical(text: str) -> str:
    """Converts text from visual order (left to right on the page) to reading order."""
    rights = RIGHT_TO_LEFT.findall(text)
    if not rights:
        return text
    if len(rights) < len(_LEFT_TO_RIGHT.findall(text)) - len(rights):
        return _RIGHT_RUN.sub(lambda run: _turned(run.group(), _NUMBER), text)
    return _turned(text, _LEFT_RUN)


def _turned(text: str, kept: re.Pattern[str]) -> str:
    """Reverses the text, except for the matches of `kept`; combining marks stay after their letters."""
    return kept.sub(lambda run: _reversed(run.group()), _reversed(text))


def _reversed(text: str) -> str:
    """Reverses the characters; combining marks stay after their letters."""
    groups: list[str] = []
    for character in text:
        if groups and unicodedata.combining(character):
            groups[-1] += character
        else:
            groups.append(character)
    return "".join(reversed(groups))


def _clusters(glyphs: Sequence[Glyph]) -> list[Glyph]:
    """Returns the letters from left to right with their combining marks; a right-to-left ligature becomes one glyph."""
    letters: list[Glyph] = []
    for place, group in groupby(glyphs, key=lambda glyph: glyph[1:]):
        text = "".join(glyph.character for glyph in group)
        if RIGHT_TO_LEFT.search(text):
            text = unicodedata.normalize("NFKC", text)[::-1]
        if not (text.isspace() or unicodedata.combining(text[0])):
            letters.append(Glyph(text, *place))
    marks = sorted((glyph for glyph in glyphs if unicodedata.combining(glyph.character[0])), key=_middle)
    if not letters:
        return marks
    letters.sort(key=_middle)
    bounds = [(_middle(one) + _middle(other)) / 2 for one, other in pairwise(letters)]
    texts = [letter.character for letter in letters]
    for mark in marks:
        texts[bisect_left(bounds, _middle(mark))] += mark.character
    return [letter._replace(character=text) for text, letter in zip(texts, letters, strict=True)]


def _middle(glyph: Glyph) -> float:
    return (glyph.left + glyph.right) / 2
