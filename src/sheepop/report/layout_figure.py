"""Draws a parallel layout: ranks as a grid of cells, communication as lines between them, and a schedule of work."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sheepop.report.figures import bare_figure
from sheepop.report.palette import NEUTRAL, REFERENCES, TRAIN, VALIDATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = tuple[int, int]
"""A row and a column of the grid."""

# Lengths in inches, letter sizes in points.
_LETTER, _LINE, _TITLE, _PAD, _MAP = 0.058, 0.135, 0.2, 0.07, 0.34
_LANE, _GUTTER, _BETWEEN, _MARGIN, _GAP, _NAME = 0.08, 0.14, 0.14, 0.15, 0.3, 0.24
_BAR, _NARROWEST = 0.19, 7.0
_SMALL, _TINY = 7.5, 6.5
_INK, _PAPER, _TINT = "#1c2127", "#ffffff", "#f5f7f9"
_PLATE = {"facecolor": _PAPER, "linewidth": 0, "pad": 3}
_WORK = {
    "forward": TRAIN,
    "backward": VALIDATION,
    "backward, activation gradients": VALIDATION,
    "backward, weight gradients": REFERENCES[2],
}


@dataclass(frozen=True)
class Cell:
    """A rank: its name, lines of text, and for each unit square the parts that it owns (left, top, width, height)."""

    name: str
    lines: Sequence[str]
    squares: Sequence[Sequence[tuple[float, float, float, float]]] = ()


@dataclass(frozen=True)
class Talk:
    """A kind of communication: its description, and the cells of each group; with `onward`, from block to block."""

    words: str
    color: str
    groups: Sequence[Sequence[Place]]
    onward: bool = False


@dataclass(frozen=True)
class Grid:
    """Cells by place, and blocks of cells, each given by its first and last place.

    `row_gaps` and `column_gaps` are texts in rows and columns without cells; names are beside the row, or above the
    column, at which a block begins.
    """

    cells: Mapping[Place, Cell]
    blocks: Sequence[tuple[Place, Place]] = ()
    row_gaps: Mapping[int, str] = field(default_factory=dict)
    column_gaps: Mapping[int, str] = field(default_factory=dict)
    row_names: Mapping[int, str] = field(default_factory=dict)
    column_names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """A piece of work in the line of one worker; `kind` is a key of the colours, `deep` marks a second stage."""

    line: int
    start: float
    end: float
    kind: str
    words: str
    deep: bool = False


@dataclass(frozen=True)
class Order:
    """A schedule: the work of each worker up to a time; `note` follows the legend of the colours."""

    title: str
    names: Sequence[str]
    bars: Sequence[Bar]
    until: float
    note: str = ""


def layout_figure(
    title: str, grid: Grid, talks: Sequence[Talk], notes: Sequence[str] = (), order: Order | None = None
) -> Figure:
    """Draws `grid`, the lines of `talks`, side by side where they overlap, their legend, notes, and the schedule."""
    return _Drawing(title, grid, talks, notes, order).draw()


@dataclass(frozen=True)
class _Line:
    """A line that joins some cells of a row, drawn below it, or of a column, drawn to its right."""

    talk: Talk
    index: int
    members: tuple[int, ...]
    across: bool
    lane: int = 0


def _lines(talks: Sequence[Talk]) -> list[_Line]:
    """A line for each column of each group, and one in the topmost row that joins the columns; each in a free lane."""
    found: list[_Line] = []

    def add(talk: Talk, index: int, members: set[int], across: bool) -> None:
        if len(members) < 2:
            return
        beside = [line for line in found if (line.index, line.across) == (index, across)]
        taken = {line.lane for line in beside if min(members) <= line.members[-1] and line.members[0] <= max(members)}
        lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        found.append(_Line(talk, index, tuple(sorted(members)), across, lane))

    for talk in talks:
        for group in () if talk.onward else talk.groups:
            columns = sorted({column for _, column in group})
            for column in columns:
                add(talk, column, {row for row, other in group if other == column}, across=False)
            if group:
                add(talk, min(row for row, _ in group), set(columns), across=True)
    return found


class _Drawing:
    """Draws a layout; coordinates are inches from the top left corner."""

    def __init__(
        self, title: str, grid: Grid, talks: Sequence[Talk], notes: Sequence[str], order: Order | None
    ) -> None:
        self.title, self.grid, self.talks, self.order = title, grid, talks, order
        self.lines = _lines(talks)
        cells = grid.cells.values()
        most = max(len(cell.lines) for cell in cells)
        squares = max(len(cell.squares) for cell in cells)
        letters = max(len(line) for cell in cells for line in (cell.name, *cell.lines))
        self.cell = (
            2 * _PAD + letters * _LETTER + (_MAP + _PAD if squares else 0),
            max(2 * _PAD + _TITLE + most * _LINE - 0.05, _PAD + squares * (_MAP + _PAD)),
        )
        across, down = self._starts(1), self._starts(0)
        left = _MARGIN + (_NAME if grid.row_names else 0)
        top = _MARGIN + 0.32 + (_NAME if grid.column_names else 0)
        self.x = {index: left + place for index, place in across.items()}
        self.y = {index: top + place for index, place in down.items()}
        self.width = max(_NARROWEST, self.x[max(self.x)] + _MARGIN)
        self.words = [*((talk.words, talk.color) for talk in talks), *((note, None) for note in notes)]
        letters = int((self.width - 2 * _MARGIN - 0.4) / (_LETTER * 0.95))
        self.wrapped = [(textwrap.wrap(words, letters), color) for words, color in self.words]
        self.foot = self.y[max(self.y)] + 0.12
        self.below = self.foot + sum(len(lines) * 0.16 + 0.04 for lines, _ in self.wrapped) + 0.1
        more = 0.0 if order is None else 0.75 + _BAR * len(order.names)
        self.height = self.below + more + 0.05

    def _starts(self, side: int) -> dict[int, float]:
        """The offsets of rows (0) or columns (1), and the end of the last one."""
        gaps = (self.grid.row_gaps, self.grid.column_gaps)[side]
        count = 1 + max([*(place[side] for place in self.grid.cells), *gaps])
        begins = {block[0][side] for block in self.grid.blocks}
        lanes = max([line.lane + 1 for line in self.lines if line.across == (side == 0)], default=0)
        found, place = dict[int, float](), 0.0
        for index in range(count):
            place += _BETWEEN if index in begins else 0.0
            found[index] = place
            place += _GAP if index in gaps else self.cell[1 - side]
            place += _GUTTER + lanes * _LANE
        return {**found, count: place}

    def draw(self) -> Figure:
        """Draws the figure."""
        figure = bare_figure(self.width, self.height)
        self.axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        self.axes.set_axis_off()
        self._write(_MARGIN, _MARGIN, self.title, size=11)
        for first, last in self.grid.blocks:
            if first != last:
                x, y, right, bottom = self._edges(first, last)
                self._box(x, y, right - x, bottom - y, _TINT, edgecolor="#c9d0d8", linewidth=0.6)
        for place, cell in self.grid.cells.items():
            self._draw_cell(self.x[place[1]], self.y[place[0]], cell)
        for line in self.lines:
            self._draw_line(line)
        for talk in self.talks:
            for group in talk.groups if talk.onward else ():
                for one, other in itertools.pairwise(group):
                    self._draw_arrow(one, other, talk.color)
        self._draw_names()
        self._draw_words()
        if self.order is not None:
            self._draw_order(self.order)
        return figure

    def _box(self, x: float, y: float, width: float, height: float, face: str, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=face, **{"linewidth": 0, **style}))

    def _write(self, x: float, y: float, words: str, *, size: float = _SMALL, **style: Any) -> None:
        style = {"ha": "left", "va": "top", "color": _INK, **style}
        self.axes.text(x, y, words, fontsize=size, parse_math=False, **style)

    def _edges(self, first: Place, last: Place) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of a block."""
        x, y = self.x[first[1]] - _PAD, self.y[first[0]] - _PAD
        return x, y, self.x[last[1]] + self.cell[0] + _PAD, self.y[last[0]] + self.cell[1] + _PAD

    def _draw_cell(self, x: float, y: float, cell: Cell) -> None:
        width, height = self.cell
        self._box(x, y, width, height, _PAPER, edgecolor=NEUTRAL, linewidth=0.8)
        self._write(x + _PAD, y + _PAD, cell.name, size=_SMALL + 1, fontweight="bold")
        for number, line in enumerate(cell.lines):
            self._write(x + _PAD, y + _PAD + _TITLE + number * _LINE, line)
        for number, parts in enumerate(cell.squares):
            left, top = x + width - _PAD - _MAP, y + _PAD + number * (_MAP + _PAD)
            self._box(left, top, _MAP, _MAP, "#e6eaee")
            for part in parts:
                across, down, wide, high = (_MAP * share for share in part)
                # Even the smallest part stays visible.
                self._box(left + across, top + down, max(wide, 0.012), max(high, 0.012), TRAIN)

    def _draw_line(self, line: _Line) -> None:
        def plot(along: Any, outward: Any, *form: str, **style: Any) -> None:
            places = (along, outward) if line.across else (outward, along)
            self.axes.plot(*places, *form, color=line.talk.color, **style)

        places, others = (self.x, self.y) if line.across else (self.y, self.x)
        along = [places[member] + 0.2 + 0.06 * line.lane for member in line.members]
        edge = others[line.index] + self.cell[line.across]
        outside = edge + (_PAD + 0.02 + line.lane * _LANE)
        for place in along:
            plot((place, place), (edge, outside), linewidth=1.4, solid_capstyle="round")
            plot(place, outside, "o", markersize=3.2)
        plot((along[0], along[-1]), (outside, outside), linewidth=1.4)

    def _draw_arrow(self, one: Place, other: Place, color: str) -> None:
        edges = [self._edges(*self._block_of(place)) for place in (one, other)]
        y = edges[0][3] - 0.28 * (edges[0][3] - edges[0][1])
        style = {"arrowstyle": "<|-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", (edges[1][0], y), (edges[0][2], y), arrowprops=style)

    def _block_of(self, place: Place) -> tuple[Place, Place]:
        return next(
            (first, last)
            for first, last in self.grid.blocks
            if first[0] <= place[0] <= last[0] and first[1] <= place[1] <= last[1]
        )

    def _draw_names(self) -> None:
        for row, words in self.grid.row_names.items():
            _, top, _, bottom = self._edges(*self._block_of((row, min(self.x))))
            self._write(_MARGIN, (top + bottom) / 2, words, rotation=90, va="center", fontweight="bold")
        for column, words in self.grid.column_names.items():
            self._write(self.x[column] - _PAD, self.y[0] - _PAD - 0.05, words, va="bottom", fontweight="bold")
        right = self.x[max(self.x)]
        for row, words in self.grid.row_gaps.items():
            self._write((self.x[0] + right) / 2, self.y[row] + _GAP / 2, words, ha="center", va="center", bbox=_PLATE)
        middle = (self.y[0] + self.y[max(self.y)]) / 2
        for column, words in self.grid.column_gaps.items():
            self._write(self.x[column] + _GAP / 2, middle, words, rotation=90, ha="center", va="center", bbox=_PLATE)

    def _draw_words(self) -> None:
        y = self.foot
        for lines, color in self.wrapped:
            if color is not None:
                self.axes.plot((_MARGIN, _MARGIN + 0.28), (y + 0.06, y + 0.06), color=color, linewidth=2)
                self.axes.plot((_MARGIN, _MARGIN + 0.28), (y + 0.06, y + 0.06), "o", color=color, markersize=3.2)
            for line in lines:
                self._write(_MARGIN + (0 if color is None else 0.4), y, line)
                y += 0.16
            y += 0.04

    def _draw_order(self, order: Order) -> None:
        left = _MARGIN + 0.75
        unit, top = (self.width - _MARGIN - left) / order.until, self.below + 0.3
        self._write(_MARGIN, self.below, order.title, size=9)
        for number, name in enumerate(order.names):
            self._write(left - 0.08, top + (number + 0.5) * _BAR, name, ha="right", va="center")
            self._box(left, top + number * _BAR, self.width - _MARGIN - left, _BAR - 0.02, "#eef1f4")
        for bar in order.bars:
            if bar.start >= order.until:
                continue
            x, y, width = left + bar.start * unit, top + bar.line * _BAR, (min(bar.end, order.until) - bar.start) * unit
            alpha = 0.55 if bar.deep else 1.0
            self._box(x, y, width, _BAR - 0.02, _WORK[bar.kind], alpha=alpha, edgecolor=_PAPER, linewidth=0.5)
            if width > 0.06 * len(bar.words):
                middle = (x + width / 2, y + _BAR / 2 - 0.01)
                self._write(*middle, bar.words, size=_TINY, ha="center", va="center", color=_PAPER)
        y = top + len(order.names) * _BAR + 0.08
        x = left
        for kind in (kind for kind in _WORK if any(bar.kind == kind for bar in order.bars)):
            self._box(x, y, 0.12, 0.12, _WORK[kind])
            self._write(x + 0.18, y + 0.06, kind, va="center")
            x += 0.4 + len(kind) * _LETTER
        self._write(x, y + 0.06, order.note, va="center")
