"""The lines of a page in reading order: columns are found by the white gutters that part them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from statistics import median

RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_WORD = re.compile(r"\w")
# Beyond these a page is a drawing or an attack; it is read from top to bottom.
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


@dataclass(frozen=True, slots=True)
class Line:
    """Text on one line, and where it stands: y grows downwards, all lengths are in one unit, points or pixels.

    `size` is the height of its letters (for print, the font size), `first_width` the width of its first word. A
    `rigid` line is a block of its own, such as a table, whose text stays as it is.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    size: float
    first_width: float
    rigid: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was read: its number from 1, its height and its lines.

    `others` are lines that run in another direction than most; they follow the text. `confidence` is that of
    recognition, None for text that the file itself holds. `tables` counts tables, `meaningless` characters that stand
    for nothing known, `unsure` lines left out because recognition was not sure of them; `is_unsearched` says that
    tables in it could not be looked for.
    """

    number: int
    height: float
    lines: Sequence[Line]
    others: Sequence[Line] = ()
    confidence: float | None = None
    tables: int = 0
    meaningless: int = 0
    unsure: int = 0
    is_unsearched: bool = False


def is_right_to_left(lines: Iterable[Line]) -> bool:
    """Whether most letters belong to scripts that are written from right to left."""
    text = "".join(line.text for line in lines)
    return 2 * len(RIGHT_TO_LEFT.findall(text)) > len(_WORD.findall(text))


def mirrored(lines: Iterable[Line]) -> list[Line]:
    """The lines as in a mirror that swaps left and right, so that text from right to left reads as the other."""
    return [replace(line, left=-line.right, right=-line.left) for line in lines]


def reading_blocks(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines in blocks, such as columns, in the order in which a page is read; pieces of one row are one line.

    `lines` must all be written from left to right, or be mirrored.
    """
    return _blocks(list(lines), _DEEPEST_COLUMNS)


def _blocks(lines: list[Line], depth: int) -> list[list[Line]]:
    gutter = _gutter(lines) if depth else None
    if gutter is None:
        return [_rows(lines)] if lines else []
    blocks: list[list[Line]] = []
    for is_across, band in _bands(lines, gutter):
        if is_across:
            blocks += _blocks(band, depth - 1)
        else:
            blocks += _blocks([line for line in band if _middle(line) < gutter], depth - 1)
            blocks += _blocks([line for line in band if _middle(line) >= gutter], depth - 1)
    return blocks


def _bands(lines: list[Line], gutter: float) -> Iterable[tuple[bool, list[Line]]]:
    """The page from top to bottom, where what runs across the gutter alternates with what keeps to columns."""
    begin, end = min(line.left for line in lines), max(line.right for line in lines)
    reach_left, reach_right = gutter - (gutter - begin) / 20, gutter + (end - gutter) / 20
    across = [line.left < reach_left and line.right > reach_right for line in lines]
    walls = [line for line, is_across in zip(lines, across, strict=True) if is_across]
    order = sorted(range(len(lines)), key=lambda index: (_height(lines[index]), lines[index].left))
    flagged = [(across[index] or _shares_row(lines[index], walls), lines[index]) for index in order]
    return [(key, [line for _, line in group]) for key, group in groupby(flagged, key=lambda pair: pair[0])]


def _shares_row(line: Line, walls: list[Line]) -> bool:
    return any(_overlap(line, wall) > 0.5 * min(line.bottom - line.top, wall.bottom - wall.top) for wall in walls)


def _gutter(lines: list[Line]) -> float | None:
    """The x of the white gutter between two columns of running text, None when there is none.

    Every two neighbours on about the same height vote for the space between them. Cells of a table have such spaces
    too; columns differ from them by longer lines that fill the width, or by lines that are not level.
    """
    if not 2 * _LEAST_COLUMN_ROWS <= len(lines) <= _MOST_LINES_IN_COLUMNS:
        return None
    pairs = _neighbours(lines)
    begin, end = min(line.left for line in lines), max(line.right for line in lines)
    if len(pairs) < _LEAST_COLUMN_ROWS or end <= begin:
        return None
    step = (end - begin) / _GUTTER_STEPS
    votes = [0] * (_GUTTER_STEPS + 2)
    for left, right in pairs:
        votes[max(0, int((left.right - begin) / step) + 1)] += 1
        votes[max(0, int((right.left - begin) / step))] -= 1
    for gutter in _peaks(votes):
        position = begin + gutter * step
        sides = [(left, right) for left, right in pairs if left.right <= position <= right.left]
        if _are_columns(sides):
            return position
    return None


def _peaks(votes: list[int]) -> list[float]:
    """The places of most agreement, those nearest to the middle first; `votes` are the changes from place to place.

    Labels in the margin of one column agree almost as well with its text as the columns do with each other.
    """
    runs = [(count, len(list(group))) for count, group in groupby(accumulate(votes))]
    found, place = [], 0
    for index, (count, length) in enumerate(runs):
        before, after = runs[index - 1][0] if index else 0, runs[index + 1][0] if index + 1 < len(runs) else 0
        if count >= _LEAST_COLUMN_ROWS and before < count > after:
            found.append((-count, place + length / 2))
        place += length
    strongest = sorted(found)[:_MOST_PEAKS]
    middles = [middle for count, middle in strongest if count <= _LEAST_AGREEMENT * strongest[0][0]]
    return sorted(middles, key=lambda middle: (abs(middle - _GUTTER_STEPS / 2), middle))


def _neighbours(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Each line with the next one to its right on about the same height, where a visible space parts them."""
    order = sorted((line for line in lines if not line.rigid), key=lambda line: line.top)
    pairs = []
    nearest: dict[int, int] = {}
    active: list[int] = []
    for index, line in enumerate(order):
        active = [other for other in active if order[other].bottom > line.top]
        for other in active:
            if _overlap(order[other], line) < 0.3 * min(order[other].size, line.size):
                continue
            left, right = (other, index) if order[other].left < line.left else (index, other)
            known = nearest.get(left)
            if known is None or order[right].left < order[known].left:
                nearest[left] = right
        active.append(index)
    for left, right in nearest.items():
        if order[right].left - order[left].right >= 0.5 * min(order[left].size, order[right].size):
            pairs.append((order[left], order[right]))
    return pairs


def _are_columns(pairs: list[tuple[Line, Line]]) -> bool:
    if len(pairs) < _LEAST_COLUMN_ROWS:
        return False
    lefts, rights = {id(pair[0]): pair[0] for pair in pairs}, {id(pair[1]): pair[1] for pair in pairs}
    length = min(median(len(line.text) for line in side.values()) for side in (lefts, rights))
    unaligned = sum(abs(left.bottom - right.bottom) > 0.15 * left.size for left, right in pairs)
    if 2 * unaligned > len(pairs):
        return length >= _LEAST_UNALIGNED_CHARACTERS
    return length >= _LEAST_COLUMN_CHARACTERS and _fills(lefts.values()) and _fills(rights.values())


def _fills(side: Iterable[Line]) -> bool:
    """Whether at least half of the lines reach about as far to the right as the longest."""
    lines = list(side)
    begin, end = min(line.left for line in lines), max(line.right for line in lines)
    return 2 * sum(line.right >= end - 0.15 * (end - begin) for line in lines) >= len(lines)


def _rows(lines: list[Line]) -> list[Line]:
    """The lines from top to bottom; what stands on one height is one line."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: (_height(line), line.left)):
        row = rows[-1] if rows else None
        if row and not line.rigid and not row[0].rigid and _on_one_row(row, line):
            row.append(line)
        else:
            rows.append([line])
    return [_joined(sorted(row, key=lambda line: line.left)) for row in rows]


def _on_one_row(row: list[Line], line: Line) -> bool:
    """Whether it stands beside the largest piece of a row; a raised or lowered mark does."""
    row = row[-_MOST_PIECES:]
    largest = max(row, key=lambda piece: piece.size)
    if _overlap(largest, line) < 0.5 * min(largest.bottom - largest.top, line.bottom - line.top):
        return False
    # Two lines above each other that overlap are no row, however close.
    return all(min(piece.right, line.right) - max(piece.left, line.left) < 0.5 * line.size for piece in row)


def _joined(row: list[Line]) -> Line:
    if len(row) == 1:
        return row[0]
    text = row[0].text
    for before, line in pairwise(row):
        gap = (line.left - before.right) / max(before.size, line.size)
        text += ("   " if gap > _CELL_GAP else " " if gap > 0.12 else "") + line.text
    return Line(
        text,
        row[0].left,
        min(line.top for line in row),
        max(line.right for line in row),
        max(line.bottom for line in row),
        max(row, key=lambda line: len(line.text)).size,
        row[0].first_width,
    )


def _overlap(one: Line, other: Line) -> float:
    return min(one.bottom, other.bottom) - max(one.top, other.top)


def _middle(line: Line) -> float:
    return (line.left + line.right) / 2


def _height(line: Line) -> float:
    return (line.top + line.bottom) / 2
