"""Tables with ruling lines in a PDF: pdfplumber makes cells of the lines, and the words of the page fill them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from sheepop.data.extract.markdown import table
from sheepop.data.extract.page_lines import Line
from sheepop.data.extract.paragraphs import join_lines
from sheepop.data.extract.pdf_words import Box, PageWords, Word

if TYPE_CHECKING:
    from sheepop.data.extract.pdf_page import PageObjects

# Points.
_SNAP = 3
# The search looks at every crossing of two lines, and at every two corners of cells.
_MOST_CROSSINGS = 200_000
_MOST_CORNERS = 3000
# Edges of cells that are closer, in points, are one edge.
_SAME_EDGE = 1.5
_LEAST_FILLED = 4
_LEAST_FILLED_SHARE = 0.5
# A frame round running text is no table, nor is one cell that holds most of it.
_LONGEST_CELL = 600
_LARGEST_SHARE = 0.6
_SHORT_CELL = 100


class TooManyLinesError(Exception):
    """A page has so many ruling lines that looking for tables would take too long."""


def find_tables(page: PageWords, objects: PageObjects) -> tuple[list[Line], PageWords]:
    """The tables on a page, each as one rigid line, and the page without their words.

    Raises `TooManyLinesError`.
    """
    found: list[Line] = []
    for cells in _cells(objects):
        grid = _Grid(cells, page)
        if grid.is_table():
            found.append(grid.line())
            page = page.without(grid.words)
    return found, page


def _cells(objects: PageObjects) -> list[list[Box]]:
    """The cells of each table on the page as it is shown, small tables first: they may lie in larger ones.

    Pdfplumber's own reading of a page takes fifty times longer than pdfium's, so only its search for cells is used,
    with the tolerances of its `TableSettings`.
    """
    from pdfplumber import table

    lines = [_edge(box, "h") for box in objects.across] + [_edge(box, "v") for box in objects.down]
    edges = table.merge_edges(lines, _SNAP, _SNAP, _SNAP, _SNAP)
    across = sum(edge["orientation"] == "h" for edge in edges)
    if across * (len(edges) - across) > _MOST_CROSSINGS:
        raise TooManyLinesError
    crossings = table.edges_to_intersections(edges, _SNAP, _SNAP)
    if len(crossings) > _MOST_CORNERS:
        raise TooManyLinesError
    tables = table.cells_to_tables(table.intersections_to_cells(crossings))
    return sorted(([Box(*cell) for cell in cells] for cells in tables), key=lambda cells: _area(_hull(cells)))


def _edge(box: Box, orientation: str) -> dict[str, Any]:
    """A line as pdfplumber describes it."""
    left, top, right, bottom = box
    return {
        "orientation": orientation,
        "x0": left,
        "x1": right,
        "top": top,
        "bottom": bottom,
        "width": right - left,
        "height": bottom - top,
    }


class _Grid:
    """The cells of one table in rows and columns, turned as the page is read, and the words in them."""

    def __init__(self, cells: list[Box], page: PageWords) -> None:
        turns = page.turns
        boxes = [cell.turned(turns, page.width, page.height) for cell in cells]
        self.box = _hull(boxes)
        rows, columns = _edges([box.top for box in boxes]), _edges([box.left for box in boxes])
        self._texts = [[""] * len(columns) for _ in rows]
        self._count = len(cells)
        self.words: list[Word] = []
        placed: list[list[Word]] = [[] for _ in boxes]
        beside = _cells_by_row(boxes, rows)
        for word in page.words:
            box = word.box.turned(turns, page.width, page.height)
            x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
            index = next((i for i in beside[_place(rows, y)] if _holds(boxes[i], x, y)), None)
            if index is not None:
                placed[index].append(word)
                self.words.append(word)
        for box, words in zip(boxes, placed, strict=True):
            row, column = _place(rows, box.top), _place(columns, box.left)
            self._texts[row][column] = f"{self._texts[row][column]} {_text(words)}".strip()

    def is_table(self) -> bool:
        """Whether there are rows and columns of short texts, and not a frame, a form or a chart."""
        filled = [text for row in self._texts for text in row if text]
        rows = sum(any(row) for row in self._texts)
        columns = sum(any(column) for column in zip(*self._texts, strict=True))
        return (
            min(rows, columns) >= 2
            and len(filled) >= max(_LEAST_FILLED, _LEAST_FILLED_SHARE * self._count)
            and max(map(len, filled)) <= min(_LONGEST_CELL, max(_SHORT_CELL, _LARGEST_SHARE * sum(map(len, filled))))
        )

    def line(self) -> Line:
        """The table as Markdown where it stands; columns without text are left out."""
        used = [any(column) for column in zip(*self._texts, strict=True)]
        texts = [[text for text, is_used in zip(row, used, strict=True) if is_used] for row in self._texts]
        return Line(table(texts), *self.box, size=1.0, first_width=0.0, rigid=True)


def _text(words: list[Word]) -> str:
    """The words of a cell, its lines joined."""
    text = ""
    for _, line in groupby(words, key=lambda word: word.line):
        joined = " ".join(word.text for word in line)
        text = join_lines(text, joined, frozenset()) if text else joined
    return text


def _cells_by_row(boxes: list[Box], rows: list[float]) -> list[list[int]]:
    """For each row the numbers of the cells that reach into it, those that begin in rows above too."""
    found: list[list[int]] = [[] for _ in rows]
    for index, box in enumerate(boxes):
        for row in range(_place(rows, box.top), _place(rows, box.bottom) + 1):
            found[row].append(index)
    return found


def _holds(box: Box, x: float, y: float) -> bool:
    return box.left <= x <= box.right and box.top <= y <= box.bottom


def _edges(positions: list[float]) -> list[float]:
    """The distinct positions in rising order, those that are nearly the same as one."""
    ordered = sorted(positions)
    return ordered[:1] + [after for before, after in pairwise(ordered) if after - before > _SAME_EDGE]


def _place(edges: list[float], position: float) -> int:
    """The number of the last edge that is not behind the position, at least 0."""
    return max(bisect_right(edges, position + _SAME_EDGE) - 1, 0)


def _hull(boxes: list[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return Box(min(lefts), min(tops), max(rights), max(bottoms))


def _area(box: Box) -> float:
    return (box.right - box.left) * (box.bottom - box.top)
