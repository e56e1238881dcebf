"""Draws block diagrams: boxes, arrows, sums and the arrow of a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sheepop.interpret.pictures import Picture
from sheepop.report.figures import bare_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sheepop.interpret.control.gains import Gain

_MOST_BOXES = 14
_WIDTH, _HEIGHT, _STEP = 2.8, 0.62, 1.0
_INK, _FILL, _LOOP = "#24292f", "#eaf2fb", "#d55e00"
_TITLES = {"a": "as it is", "b": "input joined", "c": "blocks joined", "d": "one map", "e": "the loop of generation"}


@dataclass(frozen=True)
class Box:
    """A box of a diagram: its name, and what is known of it."""

    name: str
    text: str

    @property
    def line(self) -> str:
        """The box as text."""
        return f"{self.name} [{self.text}]" if self.text else self.name


def draw_reduction(steps: Mapping[str, Sequence[Box]], forward: Box, closed: Gain) -> Picture:
    """The steps (a) to (d) side by side, each from top to bottom, and the closed loop (e)."""
    columns = {step: shortened(boxes) for step, boxes in steps.items()}
    high = max(map(len, columns.values())) + 1.0
    figure = bare_figure(3.05 * (len(columns) + 1), 0.55 * high * _STEP + 1.0)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(columns) + 1)
    for axes, (step, boxes) in zip(panels, columns.items(), strict=False):
        _prepare(axes, f"({step}) {_TITLES[step]}", high)
        _chain(axes, [Box("tokens t", ""), *boxes, Box("prediction", "")], 0.0, high)
    axes = panels[-1]
    _prepare(axes, f"(e) {_TITLES['e']}", high)
    middle = high / 2
    axes.text(0, middle + 2.4, "r: vectors of the prompt", ha="center", va="center", fontsize=7)
    _arrow(axes, (0, middle + 2.2), (0, middle + 1.62))
    _sum(axes, 0, middle + 1.45)
    _arrow(axes, (0, middle + 1.28), (0, middle + _HEIGHT / 2 + 0.3))
    _box(axes, forward, 0, middle + 0.3)
    _arrow(axes, (0, middle - _HEIGHT / 2 + 0.3), (0, middle - 1.5))
    axes.text(0, middle - 1.75, "y: expected next vectors", ha="center", va="center", fontsize=7)
    turn, below, above = 1.8, middle - 0.9, middle + 1.45
    axes.plot([0, turn, turn], [below, below, middle - 0.25], color=_LOOP, linewidth=1.2)
    axes.text(turn, middle + 0.2, "H\nchoose,\nembed,\n+1", ha="center", va="center", fontsize=7, color=_LOOP)
    axes.plot([turn, turn], [middle + 0.7, above], color=_LOOP, linewidth=1.2)
    _arrow(axes, (turn, above), (0.17, above), color=_LOOP)
    text = f"$y = (I + G H)^{{-1}} G\\, r$\nlargest {closed.largest:.3g}, typical {closed.typical.value:.3g}"
    axes.text(0, middle - 2.6, text, ha="center", va="center", fontsize=8)
    return Picture("blocks", figure, {})


def draw_block(layer: int, layout: str, boxes: Mapping[str, Box]) -> Picture:
    """The inside of one block: its branches leave the residual stream and join it again, one by one or side by side."""
    is_parallel, is_post = ", parallel" in layout, layout.startswith("post")
    mixer = next(name for name in ("attention", "mixer") if name in boxes)
    branches = [["attention norm", mixer, "attention output norm"]]
    branches.append(["feed-forward norm", "feed-forward", "feed-forward output norm"])
    if ", shared norm" in layout:
        branches[1][0] = "attention norm"
    behind = [[branch[0]] if is_post else [] for branch in branches]
    inside = [[name for name in branch[is_post:] if name in boxes] for branch in branches]
    places = max(map(len, inside)) if is_parallel else sum(map(len, inside)) + 2 * is_post
    high = places * 1.0 + (1.6 if is_parallel else 2.9)
    figure = bare_figure(7.5 if is_parallel else 4.6, 0.6 * high + 0.5)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    left, right = (-4.7, 4.7) if is_parallel else (-1.6 if is_post else -0.6, 3.8)
    _prepare(axes, f"Block {layer}: {layout}", high, left, right, low=0.0)
    axes.text(0, high - 0.25, f"$h_{{{layer}}}$", ha="center", va="center", fontsize=10)
    begin = end = high - 0.5
    for number, names in enumerate(inside):
        split = (high - 0.5 if is_parallel else begin) - 0.3
        end = split - (max(map(len, inside)) if is_parallel else len(names)) - 0.25
        beside = (-3.1, 3.1)[number] if is_parallel else 2.2
        _branch(axes, [boxes[name] for name in names], beside, split, end)
        if number == 0 or not is_parallel:
            _arrow(axes, (0, begin), (0, end + 0.16))
            _sum(axes, 0, end)
        begin = end - 0.16
        for name in behind[number]:
            _arrow(axes, (0, begin), (0, begin - 0.28))
            _box(axes, boxes[name], 0, begin - 0.28 - _HEIGHT / 2)
            begin -= 0.28 + _HEIGHT
    _arrow(axes, (0, begin), (0, begin - 0.3))
    axes.text(0, begin - 0.5, f"$h_{{{layer + 1}}}$", ha="center", va="center", fontsize=10)
    return Picture("blocks_inside", figure, {})


def _branch(axes: Axes, boxes: Sequence[Box], beside: float, split: float, end: float) -> None:
    """A branch that leaves the stream at height `split`, and joins it at `end`."""
    axes.plot([0, beside], [split, split], color=_INK, linewidth=1.0)
    top = split
    for place, box in enumerate(boxes):
        middle = split - 0.6 - place
        _arrow(axes, (beside, top), (beside, middle + _HEIGHT / 2))
        _box(axes, box, beside, middle)
        top = middle - _HEIGHT / 2
    axes.plot([beside, beside], [top, end], color=_INK, linewidth=1.0)
    _arrow(axes, (beside, end), (0.16 if beside > 0 else -0.16, end))


def shortened(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, of which those in the middle become one if there are too many to draw or to print in a line."""
    if len(boxes) <= _MOST_BOXES:
        return list(boxes)
    kept = _MOST_BOXES // 2
    return [*boxes[:kept], Box(f"{len(boxes) - 2 * kept} more blocks", ""), *boxes[-kept:]]


def _chain(axes: Axes, boxes: Sequence[Box], x: float, high: float) -> None:
    y = high - 0.4
    for number, box in enumerate(boxes):
        if box.text or 0 < number < len(boxes) - 1:
            _box(axes, box, x, y)
        else:
            axes.text(x, y, box.name, ha="center", va="center", fontsize=7)
        if number + 1 < len(boxes):
            gap = _HEIGHT / 2 if box.text else 0.18
            _arrow(axes, (x, y - gap), (x, y - _STEP + (_HEIGHT / 2 if number + 2 < len(boxes) else 0.18)))
        y -= _STEP


def _prepare(axes: Axes, title: str, high: float, left: float = -2.1, right: float = 2.1, *, low: float = -0.8) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_axis_off()


def _box(axes: Axes, box: Box, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (x - _WIDTH / 2, y - _HEIGHT / 2), _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=_FILL, edgecolor=_INK, linewidth=0.9,
    )  # fmt: skip
    axes.add_patch(shape)
    axes.text(x, y + (0.12 if box.text else 0), box.name, ha="center", va="center", fontsize=7.5, fontweight="bold")
    axes.text(x, y - 0.14, box.text, ha="center", va="center", fontsize=6)


def _sum(axes: Axes, x: float, y: float) -> None:
    axes.plot([x], [y], marker="o", markersize=11, markerfacecolor="white", markeredgecolor=_INK)
    axes.text(x, y, "+", ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    look = {"arrowstyle": "-|>", "color": _INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    axes.annotate("", xy=end, xytext=begin, arrowprops=look | style)
