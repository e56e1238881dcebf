"""Block diagrams of a real model, reduced step by step to one transfer function, with the gains of every box.

The steps follow those by which a control system is reduced (Nise, "Control Systems Engineering", chapter 5): boxes in
series become one, and a loop with forward map G and feedback H becomes ``(I + G H)^-1 G``.

A pass has no path back: a block reads lower layers and earlier positions only. A loop exists where a chosen token is
read again. G maps the vectors u_i at the input to the expected vectors y_i of the next tokens,
``y_i = E^T softmax(z_i)`` with the embedding E. H feeds them back one position later: ``u = r - H y``, where
``(H y)_i = -y_(i-1)`` behind the prompt. So ``y = (I + G H)^-1 G r``. Shapes: T tokens, D d_model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line
from sheepop.interpret.control.finding import PromptFinding
from sheepop.interpret.control.gains import Gain, gain_of, parts_of_block
from sheepop.interpret.control.jacobian import Jacobian, LinearMap, Product
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture
from sheepop.model import ModelConfig
from sheepop.report.figures import bare_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = 12
_MOST_BOXES = 14
_WIDTH, _HEIGHT = 2.8, 0.62
_SUM = 0.16  # half the height of a sum
_INK, _FILL, _LOOP = "#24292f", "#eaf2fb", "#d55e00"
_TITLES = {"a": "as it is", "b": "input joined", "c": "blocks joined", "d": "one map", "e": "the loop of generation"}
_POSITIONS = {
    "sinusoidal": "adds a sinusoid to each vector",
    "learned": "adds a learned vector to each",
    "rope": "rotates queries and keys inside attention",
    "alibi": "subtracts distances from scores inside attention",
    "none": "none",
}


@dataclass(frozen=True)
class Box:
    """A box of a diagram: its name, and what is known of it."""

    name: str
    text: str

    @property
    def line(self) -> str:
        """The box as text."""
        return f"{self.name} [{self.text}]" if self.text else self.name


@dataclass(frozen=True, eq=False)
class BlockDiagrams(PromptFinding):
    """The boxes of a network with their gains.

    `parts` are those of block `layer`, and `layout` says how they are connected. `whole` maps the embeddings to the
    last stream, `output` the last vector to the prediction in root nats, and `transfer` the embeddings to it.
    `open_loop` and `closed_loop` map input vectors to the expected vectors of the next tokens, the closed one with the
    last `fed` tokens fed back, which are `written` by the model.
    """

    verb: ClassVar[str] = "blocks"
    derived: ClassVar[tuple[str, ...]] = ("steps",)
    positions: str
    adds_positions: bool
    layer: int
    layout: str
    blocks: tuple[Gain, ...]
    parts: tuple[Gain, ...]
    whole: Gain
    output: Gain
    transfer: Gain
    open_loop: Gain
    closed_loop: Gain
    fed: int
    written: str

    @property
    def steps(self) -> dict[str, list[Box]]:
        """The boxes of the diagrams (a) to (d), from input to output."""
        embedding = Box("embedding", "E[t]")
        positions = Box("positions", self.positions)
        entry = [embedding, positions] if self.adds_positions else [embedding]
        blocks = [_box(f"block {layer}", gain) for layer, gain in enumerate(self.blocks)]
        output, together = _box("output", self.output, "root nats"), _box("G_blocks", self.whole)
        joined = Box("G_in", "embedding and positions" if self.adds_positions else "embedding")
        transfer = _box("G = G_out G_blocks G_in", self.transfer, "root nats")
        return {
            "a": [*entry, *blocks, output],
            "b": [joined, *blocks, output],
            "c": [joined, together, output],
            "d": [transfer],
        }

    def table(self) -> list[str]:
        """The diagrams in one line each."""
        lines = [f"({step}) {' -> '.join(box.line for box in shortened(boxes))}" for step, boxes in self.steps.items()]
        loop = f"largest {self.closed_loop.largest:.3g}, typical {self.closed_loop.typical.value:.3g}"
        lines.append(f"(e) (I + G H)^-1 G [{loop}], H: choose a token, embed it, one position later")
        inside = ", ".join(_box(part.name, part).line for part in self.parts)
        return [*lines, "", f"Inside block {self.layer} ({self.layout}): {inside}", f"Positions: {self.positions}."]

    def sentences(self) -> list[str]:
        """Where there is a loop, and what it does."""
        word = visible_line(self.written)
        return [
            "Inside a pass no arrow leads back: a block reads lower layers and earlier positions only. So H = 0, and "
            "the transfer function is G.",
            f"The loop of generation feeds {counted(self.fed, 'written token')} back ({word!r}). It changes the "
            f"largest gain of a vector to the expected next vectors from {self.open_loop.largest:.3g} to "
            f"{self.closed_loop.largest:.3g}, and the typical one from {self.open_loop.typical.value:.3g} to "
            f"{self.closed_loop.typical.value:.3g}.",
        ]

    def pictures(self) -> Iterator[Picture]:
        """The reduction in five steps, and the inside of one block."""
        yield draw_reduction(self.steps, _box("G", self.open_loop), self.closed_loop)
        boxes = {part.name: _box(part.name, part) for part in self.parts}
        yield draw_block(self.layer, self.layout, boxes)


def forward_map(point: OperatingPoint) -> Jacobian:
    """G at an operating point, (T, D) to (T, D).

    Positions and n-grams are those of the pass, because they are added to the vectors of tokens.
    """
    model = point.model

    def function(x_TD: Tensor) -> Tensor:
        p_TV = point.logits(point.through(x_TD[None])[-1])[0].softmax(-1)
        expected_TD = p_TV @ model.embedding.weight * model.embedding_scale
        return expected_TD if model.embedding_norm is None else model.embedding_norm(expected_TD)

    return point.derivative(function, point.states[0])


class ClosedLoop:
    """The map ``(I + G H)^-1 G``, where the outputs before the positions from `first_fed` on are fed back.

    G never maps a position to an earlier one, and H maps to the next one. So a change passes H at most T - `first_fed`
    times, and the series ``G - G H G + ...`` is exact after as many terms.
    """

    def __init__(self, forward: Jacobian, first_fed: int) -> None:
        self.point, self.value = forward.point, forward.value
        self._forward, self._first = forward, first_fed

    @property
    def num_passes(self) -> int:
        """How often a change can go round the loop: the number of positions that are fed."""
        return len(self.point) - self._first

    def jvp(self, tangent: Tensor) -> Tensor:
        """Returns the change of y for a change of r."""
        return self._summed(self._forward.jvp, tangent)

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Returns the transposed map of a change of y."""
        return self._summed(self._forward.vjp, cotangent, is_transposed=True)

    def _summed(self, product: Product, vector: Tensor, *, is_transposed: bool = False) -> Tensor:
        """The series of G, or of its transposed map, where each term is fed one position on, or back."""
        total = term = product(vector)
        read, chosen = slice(self._first, None), slice(self._first - 1, -1)
        source, target = (read, chosen) if is_transposed else (chosen, read)
        for _ in range(self.num_passes):
            fed = torch.zeros_like(term)
            fed[target] = term[source]
            term = product(fed)
            total = total + term
        return total


def _box(name: str, gain: Gain, unit: str = "") -> Box:
    return Box(name, f"largest {gain.largest:.3g}, typical {gain.typical.value:.3g}{unit and f' {unit}'}")


def block_diagrams(
    point: OperatingPoint, *, layer: int = 0, fed: int = 4, probes: int = 8, seed: int = 0
) -> BlockDiagrams:
    """Measures the boxes of a network's block diagram; the model writes `fed` likeliest tokens, which are fed back.

    Raises `UsageError` for a layer that does not exist, and for a prompt without room for the tokens.
    """
    if not 0 <= layer < point.num_layers:
        raise UsageError(f"--layer {layer} does not exist. The model has the blocks 0 to {point.num_layers - 1}.")
    longer = _continued(point, fed)
    open_loop = forward_map(longer)
    loop = ClosedLoop(open_loop, point.num_tokens)
    config = point.model.config

    def measured(name: str, map_: LinearMap) -> Gain:
        return gain_of(name, map_, _STEPS, probes, seed)

    last = point.derivative(lambda x_TD: point.read_in_nats(point.through(x_TD[None])[-1][0, -1:]), point.states[0])
    return BlockDiagrams(
        point.notes,
        point.tokens,
        _POSITIONS[config.position_encoding],
        config.position_encoding in ("sinusoidal", "learned"),
        layer,
        _layout(config),
        tuple(measured("block", point.between(at, at + 1)) for at in range(point.num_layers)),
        parts_of_block(point, layer, _STEPS, probes, seed),
        measured("whole", point.between(0, point.num_layers)),
        measured("output", point.derivative(point.read_in_nats, point.states[-1][-1:])),
        measured("transfer", last),
        measured("open loop", open_loop),
        measured("closed loop", loop),
        fed,
        "".join(longer.tokens[point.num_tokens :]),
    )


def _layout(config: ModelConfig) -> str:
    """How a block's parts are connected, in words."""
    words = {
        "parallel": config.parallel_residual,
        "shared norm": config.shared_norm,
        "a third branch of layer inputs": config.layer_inputs is not None,
    }
    return ", ".join([f"{config.norm_position} norm", *(word for word, holds in words.items() if holds)])


@torch.no_grad()
def _continued(point: OperatingPoint, count: int) -> OperatingPoint:
    """The operating point at the prompt and the `count` likeliest tokens behind it."""
    ids = list(point.trace.token_ids)
    longest = point.model.config.max_seq_len
    if count < 1 or len(ids) + count > longest:
        raise UsageError(
            f"The loop needs at least 1 written token, and room for it: {counted(len(ids), 'token')} and {count} do "
            f"not fit the context of {longest:,}. Change --fed, or shorten the prompt."
        )
    for _ in range(count):
        logits = point.model(torch.tensor([ids], device=point.model.device), logits_to_keep=1)
        ids.append(int(logits[0, -1, : point.trace.tokenizer.vocab_size].argmax()))
    return OperatingPoint.of(point.model, point.trace.tokenizer, ids, point.model.dtype, point.proceed)


def draw_reduction(steps: Mapping[str, Sequence[Box]], forward: Box, closed: Gain) -> Picture:
    """The steps (a) to (d) side by side, each from top to bottom, and the closed loop (e)."""
    columns = {step: shortened(boxes) for step, boxes in steps.items()}
    high = max(map(len, columns.values())) + 1.0
    figure = bare_figure(3.05 * len(_TITLES), 0.55 * high + 1.0)
    figure.set_layout_engine("constrained")
    panels = dict(zip(_TITLES, figure.subplots(1, len(_TITLES)), strict=True))
    for step, axes in panels.items():
        _prepare(axes, f"({step}) {_TITLES[step]}", high)
    for step, boxes in columns.items():
        _column(panels[step], 0, high - 0.4, ["tokens t", *boxes, "prediction"])
    axes, top = panels["e"], high / 2 + 2.2
    _column(axes, 0, top, ["r: vectors of the prompt", "+", forward, "y: expected next vectors"], distance=1.2)
    turn, joins, leaves = 1.8, top - 1.2, top - 3.1
    axes.plot([0, turn, turn], [leaves, leaves, top - 2.6], color=_LOOP, linewidth=1.2)
    axes.text(turn, top - 2.1, "H\nchoose,\nembed,\n+1", ha="center", va="center", fontsize=7, color=_LOOP)
    axes.plot([turn, turn], [top - 1.6, joins], color=_LOOP, linewidth=1.2)
    _arrow(axes, (turn, joins), (0.17, joins), color=_LOOP)
    text = f"$y = (I + G H)^{{-1}} G\\, r$\nlargest {closed.largest:.3g}, typical {closed.typical.value:.3g}"
    axes.text(0, top - 4.6, text, ha="center", va="center", fontsize=8)
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
            _arrow(axes, (0, begin), (0, end + _SUM))
            _element(axes, "+", 0, end)
        begin = end - _SUM
        for name in behind[number]:
            _arrow(axes, (0, begin), (0, begin - 0.28))
            _element(axes, boxes[name], 0, begin - 0.28 - _HEIGHT / 2)
            begin -= 0.28 + _HEIGHT
    _arrow(axes, (0, begin), (0, begin - 0.3))
    axes.text(0, begin - 0.5, f"$h_{{{layer + 1}}}$", ha="center", va="center", fontsize=10)
    return Picture("blocks_inside", figure, {})


def _branch(axes: Axes, boxes: Sequence[Box], beside: float, split: float, end: float) -> None:
    """A branch that leaves the stream at height `split`, and joins it at `end`."""
    axes.plot([0, beside], [split, split], color=_INK, linewidth=1.0)
    _arrow(axes, (beside, split), (beside, split - 0.6 + _HEIGHT / 2))
    last = _column(axes, beside, split - 0.6, boxes)
    axes.plot([beside, beside], [last - _HEIGHT / 2, end], color=_INK, linewidth=1.0)
    _arrow(axes, (beside, end), (math.copysign(_SUM, beside), end))


def shortened(boxes: Sequence[Box]) -> list[Box]:
    """The boxes, of which those in the middle become one if there are too many to draw or to print in a line."""
    if len(boxes) <= _MOST_BOXES:
        return list(boxes)
    kept = _MOST_BOXES // 2
    return [*boxes[:kept], Box(f"{len(boxes) - 2 * kept} more blocks", ""), *boxes[-kept:]]


def _column(axes: Axes, x: float, y: float, elements: Sequence[Box | str], distance: float = 1.0) -> float:
    """Draws elements from the height `y` down, joined by arrows, and returns the height of the last one."""
    for number, element in enumerate(elements):
        half = _half_height(element)
        if number:
            _arrow(axes, (x, y - _half_height(elements[number - 1])), (x, y - distance + half))
            y -= distance
        _element(axes, element, x, y)
    return y


def _half_height(element: Box | str) -> float:
    return _HEIGHT / 2 if isinstance(element, Box) else (_SUM if element == "+" else 0.18)


def _prepare(axes: Axes, title: str, high: float, left: float = -2.1, right: float = 2.1, *, low: float = -0.8) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_axis_off()


def _element(axes: Axes, element: Box | str, x: float, y: float) -> None:
    """Draws a box, a sum or a text around a point."""
    from matplotlib.patches import FancyBboxPatch

    if isinstance(element, str):
        if element == "+":
            axes.plot([x], [y], marker="o", markersize=11, markerfacecolor="white", markeredgecolor=_INK)
        axes.text(x, y, element, ha="center", va="center", fontsize=9 if element == "+" else 7)
        return
    shape = FancyBboxPatch(
        (x - _WIDTH / 2, y - _HEIGHT / 2), _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=_FILL, edgecolor=_INK, linewidth=0.9,
    )  # fmt: skip
    axes.add_patch(shape)
    name_y = y + (0.12 if element.text else 0)
    axes.text(x, name_y, element.name, ha="center", va="center", fontsize=7.5, fontweight="bold")
    axes.text(x, y - 0.14, element.text, ha="center", va="center", fontsize=6)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    look = {"arrowstyle": "-|>", "color": _INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    axes.annotate("", xy=end, xytext=begin, arrowprops=look | style)
