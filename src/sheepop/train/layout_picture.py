"""Draws a parallel layout as a grid: what every rank holds, and which ranks communicate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sheepop.model import ModelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.parts import part_of
from sheepop.parallel.pipeline import layers_of
from sheepop.report.layout_figure import Bar, Cell, Grid, Order, Place, Talk, layout_figure
from sheepop.report.palette import REFERENCES, RUNS, SCORE, TRAIN, VALIDATION
from sheepop.train.config import TrainingConfig
from sheepop.train.pipeline_timeline import BACKWARD, FORWARD, OF_INPUTS, OF_WEIGHTS, timeline, waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Most columns and rows of cells that stay readable, most rows if some are left out, and fewest entries of an axis.
_ACROSS, _DOWN, _DOWN_OF_MORE, _FEWEST = 8, 16, 8, 2
_MOST_STAGES, _MOST_MICRO_BATCHES, _SHOWN_UNITS = 16, 64, 48.0
_KEPT = {
    0: "Each rank holds all weights, gradients and optimizer state of its part of the network.",
    1: "Each rank holds all weights and gradients of its part of the network, and a piece of the optimizer state.",
    2: "Each rank holds all weights of its part of the network, and a piece of the gradients and optimizer state.",
    3: "Each rank holds a piece of the weights, gradients and optimizer state of its part of the network.",
}
_KINDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    OF_INPUTS: "backward, activation gradients",
    OF_WEIGHTS: "backward, weight gradients",
}


@dataclass(frozen=True)
class SharedStep:
    """A step divided over ranks: `rows` rows of `num_tokens` tokens, in micro-batches of `micro_batch` rows."""

    layout: Layout
    model: ModelConfig
    rows: int
    micro_batch: int
    num_tokens: int

    @classmethod
    def of(cls, model: ModelConfig, training: TrainingConfig, layout: Layout, num_tokens: int) -> SharedStep:
        """The step of a run, whose micro-batch size the layout has set."""
        assert training.micro_batch_size is not None
        return cls(layout, model, training.global_batch_size, training.micro_batch_size, num_tokens)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of each data rank."""
        return math.ceil(self.rows / self.micro_batch) // self.layout.num_data

    def of_rank(self, rank: int) -> Cell:
        """A rank's share of the network, of the batch and of the training state."""
        layout = self.layout.at(rank)
        config, model = layout.config, self.model
        stages = config.stages_of(layout.pipeline_rank)
        layers = [layers_of(stage, config.num_stages, model.num_layers) for stage in stages]
        batches = layout.share(math.ceil(self.rows / self.micro_batch))
        rows = range(batches.start * self.micro_batch, min(self.rows, batches.stop * self.micro_batch))
        tokens = part_of(range(self.num_tokens), layout.context_rank, config.context)
        features = part_of(range(model.ffn_size), layout.tensor_rank, config.tensor)
        heads = part_of(range(model.num_heads), layout.tensor_rank, config.tensor)
        ends = [name for name, has in (("embedding", 0 in stages), ("head", config.num_stages - 1 in stages)) if has]
        lines = [_span("layer", *layers), f"rows {_short(rows)}" if len(rows) > 1 else f"row {rows.start + 1:,}"]
        if config.pipeline > 1 and ends:
            lines.insert(1, " and ".join(ends))
        if config.context > 1:
            lines.append(_span("token", tokens))
        if config.tensor > 1:
            lines += [_span("head", heads), _span("feature", features)]
            if ends:
                words = part_of(range(model.vocabulary), layout.tensor_rank, config.tensor)
                lines.append(f"vocabulary {_short(words)}")
            lines.append(f"between layers {_span('token', part_of(tokens, layout.tensor_rank, config.tensor))}")
        if config.expert > 1 and model.experts is not None:
            lines.append(_span("expert", part_of(range(model.experts.count), layout.expert_rank, config.expert)))
        if config.context > 1 and config.context_method == "ulysses":
            lines.append(f"attends with {_span('head', part_of(heads, layout.context_rank, config.context))}")
        lines += _piece(layout)
        network = [_square(each, model.num_layers, features, model.ffn_size) for each in layers]
        return Cell(f"rank {rank:,}", lines, (network, [_square(rows, self.rows, tokens, self.num_tokens)]))


@dataclass(frozen=True)
class Exchange:
    """A communication within groups of `count` ranks, `stride` apart; every rank is in one group."""

    words: str
    color: str
    stride: int
    count: int
    onward: bool = False

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """The groups that `size` ranks form."""
        firsts = (rank for rank in range(size) if rank // self.stride % self.count == 0)
        return [tuple(range(first, first + self.stride * self.count, self.stride)) for first in firsts]


def exchanges(layout: Layout, model: ModelConfig) -> list[Exchange]:
    """The communications of a layout, in groups of several ranks."""
    config, pieces = layout.config, layout.num_pieces
    replicas = layout.num_copies // pieces
    tied = " The first and the last stage all-reduce the gradient of the embedding, which is also the head."
    is_apart = model.tie_weights and config.stages_of(0)[-1] != config.num_stages - 1
    of_pieces = {
        1: "Gradients are reduce-scattered once a step, and new weights are all-gathered",
        2: "Gradients are reduce-scattered at each micro-batch, and new weights are all-gathered",
        3: "Weights are all-gathered block by block, and gradients are reduce-scattered",
    }
    whole = "Gradients are all-reduced once a step"
    of_replicas = "The gradients of a piece are all-reduced over copies" if pieces > 1 else whole
    found = [
        Exchange(
            f"Activations go to the next stage, and their gradients back.{tied if is_apart else ''}",
            REFERENCES[2], layout.stage_size, config.pipeline, onward=True,
        ),
        Exchange(
            "Tokens are all-gathered before each sublayer, and sums are reduce-scattered after it",
            TRAIN, 1, config.tensor,
        ),
        Exchange(
            "Keys and values circulate in attention" if config.context_method == "ring"
            else "Tokens are exchanged for heads in attention",
            REFERENCES[1], config.tensor, config.context,
        ),
        Exchange("Tokens go to their experts and back", RUNS[3], 1, config.expert),
        Exchange(of_pieces.get(config.zero, whole), VALIDATION, config.tensor, pieces),
        Exchange(of_replicas, SCORE if pieces > 1 else VALIDATION, config.tensor * pieces, replicas),
    ]  # fmt: skip
    return [exchange for exchange in found if exchange.count > 1]


def draw_layout(step: SharedStep) -> Figure:
    """Draws the ranks of a layout, of a large one the first and last of each axis, and the schedule of a pipeline."""
    layout, size = step.layout, step.layout.ranks.size
    across, down = _axes(layout)
    is_long = math.prod(axis.size for axis in down) > _DOWN
    columns, rows = list(_slots(across, _ACROSS)), list(_slots(down, _DOWN_OF_MORE if is_long else _DOWN))
    places = {
        row.rank + column.rank: (number, index)
        for number, row in enumerate(rows)
        for index, column in enumerate(columns)
        if row.words is None and column.words is None
    }
    talks = [
        Talk(_named(exchange, size), exchange.color, _placed(exchange, size, places), exchange.onward)
        for exchange in exchanges(layout, step.model)
    ]
    blocks = _blocks(layout, places)
    grid = Grid(
        {place: step.of_rank(rank) for rank, place in places.items()},
        list(blocks.values()),
        row_gaps={index: slot.words for index, slot in enumerate(rows) if slot.words is not None},
        column_gaps={index: slot.words for index, slot in enumerate(columns) if slot.words is not None},
        row_names=_row_names(layout, down, blocks),
        column_names=_column_names(layout, blocks),
    )
    squares = (
        "Upper square of a rank: its layers (top to bottom) and its share of their features (left to right). "
        "Lower square: its rows of a step (top to bottom) and its tokens of these rows (left to right)."
    )
    return layout_figure(layout.words, grid, talks, [_KEPT[layout.config.zero], squares], _order(step))


@dataclass(frozen=True)
class _Axis:
    """A dimension of the grid: `size` entries `stride` ranks apart, each for `wide` ranks of the kind `name`."""

    name: str
    size: int
    stride: int
    wide: int = 1


@dataclass(frozen=True)
class _Slot:
    """A row or column with its first rank; with `words`, it stands for rows or columns that are left out."""

    rank: int
    words: str | None = None


def _axes(layout: Layout) -> tuple[list[_Axis], list[_Axis]]:
    """The axes of the columns and those of the rows, each with the largest stride first.

    Stages are columns and data ranks are rows; tensor and context ranks go where there is room. Without stages, data
    ranks fill lines; if they form several copies of the model, each line is one copy.
    """
    config, inner = layout.config, layout.parts_of_rows
    data = _Axis("data rank", layout.num_data, inner)
    across, down = [_Axis("stage", config.pipeline, layout.stage_size)], [data]
    if config.pipeline == 1 and (inner == 1 or data.size > _ACROSS):
        most = min(_ACROSS // min(inner, _ACROSS), data.size)
        pieces = layout.num_pieces
        is_copy = inner == 1 < pieces < data.size and pieces <= most
        wide = pieces if is_copy else max(n for n in range(1, most + 1) if data.size % n == 0)
        across = [replace(data, size=wide)]
        down = [replace(data, size=data.size // wide, stride=data.stride * wide, wide=wide)]
    for axis in (_Axis("tensor rank", config.tensor, 1), _Axis("context rank", config.context, config.tensor)):
        beside = math.prod(each.size for each in across) * axis.size
        is_across = axis.name == "tensor rank" and (beside <= _ACROSS or config.context > 1)
        (across if is_across else down).append(axis)
    return [axis for axis in across if axis.size > 1], [axis for axis in down if axis.size > 1]


def _slots(axes: Sequence[_Axis], most: int) -> Iterator[_Slot]:
    """The rows or columns of `axes`, at most `most` with ranks: the first ones and the last one of each axis."""
    shown = [axis.size for axis in axes]
    while math.prod(shown) > most and max(shown) > _FEWEST:
        shown[shown.index(max(shown))] -= 1
    yield from _slots_of(axes, shown, 0)


def _slots_of(axes: Sequence[_Axis], shown: Sequence[int], first: int) -> Iterator[_Slot]:
    if not axes:
        yield _Slot(first)
        return
    axis = axes[0]
    left = (axis.size - shown[0]) * axis.wide
    for index in range(shown[0] - 1):
        yield from _slots_of(axes[1:], shown[1:], first + index * axis.stride)
    if left:
        yield _Slot(first, f"and {left:,} more {axis.name}{'s' if left > 1 else ''} alike")
    yield from _slots_of(axes[1:], shown[1:], first + (axis.size - 1) * axis.stride)


def _placed(exchange: Exchange, size: int, places: Mapping[int, Place]) -> list[list[Place]]:
    """The cells of each group, for groups with several ranks in the grid."""
    groups = [[places[rank] for rank in group if rank in places] for group in exchange.groups(size)]
    return [group for group in groups if len(group) > 1]


def _blocks(layout: Layout, places: Mapping[int, Place]) -> dict[int, tuple[Place, Place]]:
    """The first and last place of each block of ranks with the same layers and rows, by its first rank."""
    found: dict[int, list[Place]] = {}
    for rank, place in places.items():
        found.setdefault(rank - rank % layout.parts_of_rows, []).append(place)
    return {rank: (min(block), max(block)) for rank, block in found.items()}


def _row_names(layout: Layout, down: Sequence[_Axis], blocks: Mapping[int, tuple[Place, Place]]) -> dict[int, str]:
    if not down or down[0].name != "data rank" or down[0].stride > layout.parts_of_rows:
        return {}
    rows = {first[0]: rank for rank, (first, _) in blocks.items() if first[1] == 0}
    return {row: f"data rank {layout.at(rank).data_rank:,}" for row, rank in rows.items()}


def _column_names(layout: Layout, blocks: Mapping[int, tuple[Place, Place]]) -> dict[int, str]:
    config = layout.config
    if config.pipeline == 1:
        return {}
    found = {}
    for rank, (first, _) in blocks.items():
        stages = [stage + 1 for stage in config.stages_of(rank // layout.stage_size)]
        words = " and ".join(f"{stage:,}" for stage in stages)
        found[first[1]] = f"{'stage' if len(stages) == 1 else 'stages'} {words} of {config.num_stages:,}"
    return found


def _named(exchange: Exchange, size: int) -> str:
    """The words of an exchange and the first groups that take part."""
    groups = exchange.groups(size)
    most = 4
    words = "; ".join(_members(group) for group in groups[:most])
    more = f"; and {len(groups) - most:,} more alike" if len(groups) > most else ""
    return f"{exchange.words.rstrip('.')}. Between ranks {words}{more}."


def _members(group: Sequence[int]) -> str:
    if len(group) <= 8:
        return ", ".join(f"{rank:,}" for rank in group)
    return f"{group[0]:,}, {group[1]:,}, ... {group[-1]:,}"


def _piece(layout: Layout) -> list[str]:
    """The piece of the sharded state that a rank holds, and the copy that it belongs to."""
    pieces = layout.num_pieces
    if pieces == 1:
        return []
    number, replicas = layout.ranks.rank % layout.stage_size // layout.config.tensor, layout.num_copies // pieces
    copy = f", copy {number // pieces + 1:,}" if replicas > 1 else ""
    return [f"piece {number % pieces + 1:,} of {pieces:,}{copy}"]


def _order(step: SharedStep) -> Order | None:
    """The schedule of a pipeline, with as many micro-batches as can be seen; None for too many ranks."""
    config, count = step.layout.config, step.num_micro_batches
    if not 1 < config.pipeline <= _MOST_STAGES:
        return None
    drawn = min(count, _MOST_MICRO_BATCHES // config.pipeline * config.pipeline)
    spans = timeline(config, drawn)
    end = max(span.end for span in spans)
    lost = f", waiting time {waiting(spans):.0%} of computing time" if drawn == count else ""
    begins = "" if end <= _SHOWN_UNITS else "; only its start is drawn"
    title = f"{config.schedule}: {count:,} micro-batches through {config.num_stages} stages{lost}{begins}"
    note = "paler: the second stage of a rank" if config.num_stages > config.pipeline else ""
    bars = [
        Bar(
            span.rank,
            span.start,
            span.end,
            _KINDS[span.work.kind],
            str(span.work.micro_batch + 1),
            deep=span.work.stage >= config.pipeline,
        )
        for span in spans
    ]
    names = [f"rank {rank * step.layout.stage_size:,}" for rank in range(config.pipeline)]
    return Order(title, names, bars, min(end, _SHOWN_UNITS), note)


def _short(numbers: range) -> str:
    """A range as text, counted from 1."""
    return f"{numbers.start + 1:,}–{numbers.stop:,}" if len(numbers) > 1 else f"{numbers.start + 1:,}"


def _span(noun: str, *parts: range) -> str:
    is_one = len(parts) == 1 and len(parts[0]) == 1
    return f"{noun}{'' if is_one else 's'} {' and '.join(_short(part) for part in parts)}"


def _square(down: range, height: int, across: range, width: int) -> tuple[float, float, float, float]:
    """A part of a unit square: left, top, width and height."""
    return across.start / width, down.start / height, len(across) / width, len(down) / height
