"""Tables with ruling lines in a PDF: pdfplumber makes cells of the lines, and the words of the page fill them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

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
# Lines are on one height, and words apart, in multiples of the size of the letters.
_SAME_HEIGHT = 0.3
_BLANK = 0.25


class TooManyLinesError(Exception):
    """A page has so many ruling lines that looking for tables would take too long."""


def find_tables(page: PageWords, objects: PageObjects) -> tuple[list[Line], PageWords]:
    """The tables on a page, each as one rigid line, and the page without their words.

    A grid whose rules part only some of its rows and columns is left to be read as text, which keeps rows together.
    Raises `TooManyLinesError`.
    """
    found: list[Line] = []
    tables = _tables(objects)
    hulls = [_hull(cells) for cells, _ in tables]
    for cells, reach in tables:
        grid = _Grid(cells, page)
        if grid.is_table() and not grid.is_stacked() and not _has_words_beside(page, grid, reach, hulls):
            found.append(grid.line())
            page = page.without(grid.words)
    return found, page


def _has_words_beside(page: PageWords, grid: _Grid, reach: Box, hulls: list[Box]) -> bool:
    """Whether the rules of a grid reach round words that are in none of its cells, nor in another table's."""
    inside = {id(word) for word in grid.words}
    for word in page.words:
        x, y = (word.box.left + word.box.right) / 2, (word.box.top + word.box.bottom) / 2
        if id(word) not in inside and _holds(reach, x, y):
            others = (hull for hull in hulls if hull != grid.hull)
            if not any(_holds(hull, x, y) for hull in others):
                return True
    return False


def _tables(objects: PageObjects) -> list[tuple[list[Box], Box]]:
    """The cells of each table on the page as it is shown, and how far its rules reach.

    Small tables come first: they may lie in larger ones. Pdfplumber's own reading of a page takes fifty times longer
    than pdfium's, so only its search for cells is used, with the tolerances of its `TableSettings`.
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
    rules = [(edge["orientation"], Box(edge["x0"], edge["top"], edge["x1"], edge["bottom"])) for edge in edges]
    found = [[Box(*cell) for cell in cells] for cells in table.cells_to_tables(table.intersections_to_cells(crossings))]
    return sorted(((cells, _reach(_hull(cells), rules)) for cells in found), key=lambda table: _area(_hull(table[0])))


def _reach(hull: Box, rules: list[tuple[str, Box]]) -> Box:
    """The box round the rules that cross the cells in `hull`, both as far along as those at its edges."""
    left, top, right, bottom = hull
    for orientation, rule in rules:
        if max(rule.left, hull.left) > min(rule.right, hull.right) + _SNAP:
            continue
        if max(rule.top, hull.top) > min(rule.bottom, hull.bottom) + _SNAP:
            continue
        if orientation == "h":
            left, right = min(left, rule.left), max(right, rule.right)
        else:
            top, bottom = min(top, rule.top), max(bottom, rule.bottom)
    return Box(left, top, right, bottom)


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
        self.hull, self.box = _hull(cells), _hull(boxes)
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
        self._cells: list[list[_CellLines]] = [[] for _ in rows]
        for box, words in zip(boxes, placed, strict=True):
            row, column = _place(rows, box.top), _place(columns, box.left)
            self._texts[row][column] = f"{self._texts[row][column]} {_text(words)}".strip()
            if words:
                self._cells[row].append(_CellLines.of(box, words, page))

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

    def is_stacked(self) -> bool:
        """Whether most words are in cells that hold several rows, which no rules part."""
        padding = min((cell.margin for row in self._cells for cell in row), default=0.0)
        stacked = sum(sum(cell.num_words for cell in row) for row in self._cells if _are_stacked(row, padding))
        return 2 * stacked > len(self.words)

    def line(self) -> Line:
        """The table as Markdown where it stands; columns without text are left out."""
        used = [any(column) for column in zip(*self._texts, strict=True)]
        texts = [[text for text, is_used in zip(row, used, strict=True) if is_used] for row in self._texts]
        return Line(table(texts), *self.box, size=1.0, first_width=0.0, rigid=True)


class _CellLines(NamedTuple):
    """The lines in a cell: where they stand, and their widths and those of their first words, in letters' sizes.

    `margin` is the least distance to the cell's sides, which are `width` apart.
    """

    heights: list[float]
    widths: list[float]
    first_widths: list[float]
    margin: float
    width: float
    num_words: int

    @classmethod
    def of(cls, box: Box, words: list[Word], page: PageWords) -> _CellLines:
        size = words[0].size
        grouped = groupby(words, key=lambda word: word.line)
        lines = [[word.box.turned(page.turns, page.width, page.height) for word in line] for _, line in grouped]
        return cls(
            [line[0].bottom / size for line in lines],
            [(line[-1].right - line[0].left) / size for line in lines],
            [(line[0].right - line[0].left) / size for line in lines],
            min(min(line[0].left - box.left, box.right - line[-1].right) for line in lines) / size,
            (box.right - box.left) / size,
            len(words),
        )

    def is_broken_early(self, padding: float) -> bool:
        """Whether most lines end where the next word would have fitted, as no wrapped text does."""
        room = self.width - 2 * padding - _BLANK
        early = sum(line + word < room for line, word in zip(self.widths, self.first_widths[1:], strict=False))
        return 2 * early > len(self.heights) - 1


def _are_stacked(cells: list[_CellLines], padding: float) -> bool:
    """Whether the cells of a row begin several lines at the same heights, and not for lack of room."""
    count = max((len(cell.heights) for cell in cells), default=0)
    longest = [cell for cell in cells if len(cell.heights) == count]
    if count < 2 or len(longest) < 2 or 2 * len(longest) <= len(cells):
        return False
    heights = longest[0].heights
    is_level = all(abs(a - b) <= _SAME_HEIGHT for cell in longest for a, b in zip(cell.heights, heights, strict=True))
    return is_level and any(cell.is_broken_early(padding) for cell in longest)


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
