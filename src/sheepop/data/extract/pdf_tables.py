"""Finds tables with ruling lines in a PDF: pdfplumber makes cells of the lines, and the words of the page fill them."""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pdfplumber import table

from sheepop.data.extract import markdown
from sheepop.data.extract.page_lines import Line
from sheepop.data.extract.paged_text import join_lines
from sheepop.data.extract.pdf_forms import Box, Word

_Edges = tuple[float, float, float, float]
# Points.
_SNAP = 3
# The time of the search grows with the pairs of crossing lines, and with the pairs of corners of cells.
_MOST_CROSSINGS = 200_000
_MOST_CORNERS = 3000
_LEAST_FILLED = 4
_LEAST_FILLED_SHARE = 0.5
# A frame around running text is not a table, and neither is a grid with most of the text in one cell.
_LONGEST_CELL = 600
_LARGEST_SHARE = 0.6
_SHORT_CELL = 100
# In multiples of the size of the letters: how far lines on the same height may differ, and the width of a blank.
_SAME_HEIGHT = 0.3
_BLANK = 0.25


class TooManyLinesError(Exception):
    """A page has so many ruling lines that searching for tables would take too long."""


def find_tables(words: list[Word], across: list[Box], down: list[Box]) -> tuple[list[Line], list[Word]]:
    """Returns the tables that these horizontal and vertical rules form, each as a rigid line, and the other words.

    A grid whose rules separate only some of its rows and columns is not a table; as text, its rows stay together.
    Raises `TooManyLinesError`.
    """
    found: list[Line] = []
    grids, rules = _grids(across, down)
    hulls = [grid.bbox for grid in grids]
    boxes = np.array([word.box for word in words])
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    is_free = np.ones(len(words), dtype=bool)
    for grid, hull in zip(grids, hulls, strict=True):
        if len(grid.cells) < _LEAST_FILLED:
            continue
        is_left = is_free.copy()
        rows: list[list[_Cell | None]] = [[None] * len(row.cells) for row in grid.rows]
        for row, cells in zip(grid.rows, rows, strict=True):
            for column, box in enumerate(row.cells):
                if box is None:
                    continue
                inside = np.flatnonzero(is_left & _holds(box, middles))
                if len(inside):
                    cells[column] = _cell(Box(*box), [words[index] for index in inside])
                    is_left[inside] = False
        columns = [column for column in zip(*rows, strict=True) if any(column)]
        texts = [[cell.text if cell else "" for cell in row] for row in zip(*columns, strict=True)]
        is_table = _is_table(texts, len(grid.cells)) and not _is_stacked(rows)
        if is_table and not _has_words_beside(middles[is_left], hull, hulls, rules):
            found.append(Line(markdown.table(texts), *hull, size=1.0, first_width=0.0, rigid=True))
            is_free = is_left
    return found, [words[index] for index in np.flatnonzero(is_free)]


def _grids(across: list[Box], down: list[Box]) -> tuple[list[table.Table], NDArray[np.float64]]:
    """Returns the grids of cells, small ones first as they may be inside larger ones, and the rules as boxes.

    Only pdfplumber's search for cells is used, with the tolerances of its `TableSettings`; its own reading of a page
    takes fifty times as long as pdfium's.
    """
    lines = [_edge(box, "h") for box in across] + [_edge(box, "v") for box in down]
    edges = table.merge_edges(lines, _SNAP, _SNAP, _SNAP, _SNAP)
    num_across = sum(edge["orientation"] == "h" for edge in edges)
    if num_across * (len(edges) - num_across) > _MOST_CROSSINGS:
        raise TooManyLinesError
    crossings = table.edges_to_intersections(edges, _SNAP, _SNAP)
    if len(crossings) > _MOST_CORNERS:
        raise TooManyLinesError
    cells = table.intersections_to_cells(crossings)
    grids = [table.Table(cast("Any", None), group) for group in table.cells_to_tables(cells)]  # they need no page
    rules = np.array([[edge[side] for side in ("x0", "top", "x1", "bottom")] for edge in edges])
    return sorted(grids, key=lambda grid: (grid.bbox[2] - grid.bbox[0]) * (grid.bbox[3] - grid.bbox[1])), rules


def _edge(box: Box, orientation: str) -> dict[str, Any]:
    """Returns a line in the form of pdfplumber."""
    sides = {"x0": box.left, "x1": box.right, "top": box.top, "bottom": box.bottom}
    return {**sides, "orientation": orientation, "width": box.right - box.left, "height": box.bottom - box.top}


def _holds(box: _Edges, points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns a mask of the points that are in a box."""
    are_inside: NDArray[np.bool_] = (points >= box[:2]) & (points <= box[2:])
    return are_inside[:, 0] & are_inside[:, 1]


def _has_words_beside(
    middles: NDArray[np.float64], hull: _Edges, hulls: list[_Edges], rules: NDArray[np.float64]
) -> bool:
    """Returns whether the rules of a grid enclose words that are neither in its cells nor in another grid."""
    shared = np.minimum(rules[:, 2:], hull[2:]) - np.maximum(rules[:, :2], hull[:2])
    boxes = np.vstack([hull, rules[(shared >= -_SNAP).all(axis=1)]])
    middles = middles[_holds((*boxes[:, :2].min(axis=0), *boxes[:, 2:].max(axis=0)), middles)]
    for other in hulls:
        if other != hull:
            middles = middles[~_holds(other, middles)]
    return len(middles) > 0


class _Cell(NamedTuple):
    """A cell with text: its box, the size of its letters, and the boxes of the words on each line."""

    text: str
    box: Box
    size: float
    lines: list[list[Box]]

    @property
    def margin(self) -> float:
        """The smallest distance from a line to the cell's sides, in multiples of the size."""
        sides = (min(line[0].left - self.box.left, self.box.right - line[-1].right) for line in self.lines)
        return min(sides) / self.size

    def is_broken_early(self, padding: float) -> bool:
        """Returns whether most lines end although the next word would have fitted, unlike wrapped text."""
        room = self.box.right - self.box.left - (2 * padding + _BLANK) * self.size
        widths = [line[-1].right - line[0].left for line in self.lines]
        firsts = [line[0].right - line[0].left for line in self.lines[1:]]
        early = sum(width + first < room for width, first in zip(widths, firsts, strict=False))
        return 2 * early > len(firsts)


def _cell(box: Box, words: list[Word]) -> _Cell:
    lines = [list(line) for _, line in groupby(words, key=lambda word: word.line)]
    texts = [" ".join(word.text for word in line) for line in lines]
    text = reduce(lambda before, after: join_lines(before, after, frozenset()), texts)
    return _Cell(text, box, words[0].size, [[word.box for word in line] for line in lines])


def _is_table(texts: list[list[str]], num_cells: int) -> bool:
    """Returns whether a grid has rows and columns of short texts, unlike a frame, a form or a chart."""
    lengths = [len(text) for row in texts for text in row if text]
    return (
        len(lengths) >= max(_LEAST_FILLED, _LEAST_FILLED_SHARE * num_cells)
        and min(sum(map(any, texts)), len(texts[0])) >= 2
        and max(lengths) <= min(_LONGEST_CELL, max(_SHORT_CELL, _LARGEST_SHARE * sum(lengths)))
    )


def _is_stacked(rows: list[list[_Cell | None]]) -> bool:
    """Returns whether most words are in cells with several rows of text that no rules separate."""
    filled = [[cell for cell in row if cell] for row in rows]
    padding = min(cell.margin for row in filled for cell in row)
    counts = [sum(len(line) for cell in row for line in cell.lines) for row in filled]
    stacked = sum(count for count, row in zip(counts, filled, strict=True) if row and _are_stacked(row, padding))
    return 2 * stacked > sum(counts)


def _are_stacked(cells: list[_Cell], padding: float) -> bool:
    """Returns whether the cells of a row have several lines at the same heights, and not for lack of room."""
    count = max(len(cell.lines) for cell in cells)
    longest = [cell for cell in cells if len(cell.lines) == count]
    if count < 2 or len(longest) < 2 or 2 * len(longest) <= len(cells):
        return False
    first, *others = [[line[0].bottom / cell.size for line in cell.lines] for cell in longest]
    is_level = all(abs(a - b) <= _SAME_HEIGHT for other in others for a, b in zip(first, other, strict=True))
    return is_level and any(cell.is_broken_early(padding) for cell in longest)
