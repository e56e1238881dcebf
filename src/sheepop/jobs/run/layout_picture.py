"""A layout as a picture: what every rank has, and who talks to whom, read off the layout and put into a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sheepop.checkpoint import RunDirectory
from sheepop.core.facts import counted
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import RunRecord
from sheepop.model import ModelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.pipeline import BACKWARD, FORWARD, OF_INPUTS, OF_WEIGHTS, layers_of, timeline, waiting
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.tensor import divides_vocabulary
from sheepop.report import Page, save_png
from sheepop.report.layout_figure import Bar, Cell, Grid, Order, Place, Talk, layout_figure
from sheepop.report.palette import REFERENCES, RUNS, SCORE, TRAIN, VALIDATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUT = "layout.png"
# Cells beside and below each other, of which a reader still sees each; where some are left out, as many below.
_ACROSS, _DOWN, _DOWN_OF_MORE, _FEWEST = 8, 16, 8, 2
_MOST_STAGES, _MOST_MICRO_BATCHES, _SHOWN_UNITS = 16, 64, 48.0
_KEPT = {
    0: "Of its part of the network each rank has weights, gradients and optimizer state whole.",
    1: "Of its part of the network each rank has weights and gradients whole, and a piece of the optimizer state.",
    2: "Of its part of the network each rank has weights whole, and a piece of gradients and optimizer state.",
    3: "Of its part of the network each rank has a piece of weights, gradients and optimizer state.",
}
_KINDS = {
    FORWARD: "forwards",
    BACKWARD: "backwards",
    OF_INPUTS: "backwards, gradients of activations",
    OF_WEIGHTS: "gradients of weights",
}


@dataclass(frozen=True)
class SharedStep:
    """A step as ranks share it: `rows` of `num_tokens`, in micro-batches of `micro_batch` rows."""

    layout: Layout
    model: ModelConfig
    rows: int
    micro_batch: int
    num_tokens: int

    @classmethod
    def of(cls, config: SheepOpConfig, layout: Layout, num_tokens: int) -> SharedStep:
        """That of a run whose steps are shared already; see `sheepop.jobs.layout.shared_steps`."""
        training = config.training
        assert training.micro_batch_size is not None
        return cls(layout, config.model, training.global_batch_size, training.micro_batch_size, num_tokens)

    @property
    def num_micro_batches(self) -> int:
        """Of a data rank."""
        return math.ceil(self.rows / self.micro_batch) // self.layout.num_data

    def of_rank(self, rank: int) -> Cell:
        """What a rank has of the network, of the batch, and of what is learnt."""
        layout = replace(self.layout, ranks=Ranks(rank, self.layout.ranks.size))
        config, model = layout.config, self.model
        stages = config.stages_of(layout.pipeline_rank)
        layers = [layers_of(stage, config.num_stages, model.num_layers) for stage in stages]
        batches = layout.share(math.ceil(self.rows / self.micro_batch))
        rows = range(batches.start * self.micro_batch, min(self.rows, batches.stop * self.micro_batch))
        tokens = _part(range(self.num_tokens), layout.context_rank, config.context)
        features = _part(range(model.ffn_size), layout.tensor_rank, config.tensor)
        heads = _part(range(model.num_heads), layout.tensor_rank, config.tensor)
        ends = [name for name, has in (("embedding", 0 in stages), ("head", config.num_stages - 1 in stages)) if has]
        lines = [_span("layer", *layers), f"rows {_short(rows)}" if len(rows) > 1 else f"row {rows.start + 1:,}"]
        if config.pipeline > 1 and ends:
            lines.insert(1, " and ".join(ends))
        if config.context > 1:
            lines.append(_span("token", tokens))
        if config.tensor > 1:
            lines += [_span("head", heads), _span("feature", features)]
            if ends and divides_vocabulary(model, config.tensor):
                words = _part(range(model.vocabulary), layout.tensor_rank, config.tensor)
                lines.append(f"vocabulary {_short(words)}")
            lines.append(f"between layers {_span('token', _part(tokens, layout.tensor_rank, config.tensor))}")
        if config.expert > 1 and model.experts is not None:
            lines.append(_span("expert", _part(range(model.experts.count), layout.expert_rank, config.expert)))
        if config.context > 1 and config.context_method == "ulysses":
            lines.append(f"attends with {_span('head', _part(heads, layout.context_rank, config.context))}")
        lines += _piece(layout)
        network = [_square(each, model.num_layers, features, model.ffn_size) for each in layers]
        return Cell(f"rank {rank:,}", lines, (network, [_square(rows, self.rows, tokens, self.num_tokens)]))


@dataclass(frozen=True)
class Exchange:
    """What is said within groups of ranks, `count` of them `stride` apart; every rank is in one group."""

    words: str
    color: str
    stride: int
    count: int
    onward: bool = False

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """The groups of `size` ranks."""
        firsts = (rank for rank in range(size) if rank // self.stride % self.count == 0)
        return [tuple(range(first, first + self.stride * self.count, self.stride)) for first in firsts]


def exchanges(layout: Layout, model: ModelConfig) -> list[Exchange]:
    """Who talks to whom about what, where a group has several ranks."""
    config, pieces = layout.config, layout.num_pieces
    replicas = layout.num_copies // pieces
    tied = " The first and the last stage add up the gradient of the embedding, which is the head too."
    is_apart = model.tie_weights and config.stages_of(0)[-1] != config.num_stages - 1
    of_pieces = {
        1: "Gradients are added up in pieces once a step, and new weights gathered",
        2: "Gradients are added up in pieces at each micro-batch, and new weights gathered",
        3: "Weights are gathered block by block, and gradients added up in pieces",
    }
    whole = "Gradients are added up once a step"
    of_replicas = "The gradients of a piece are added up over copies" if pieces > 1 else whole
    found = [
        Exchange(
            f"Micro-batches go on to the next stage, and their gradients back.{tied if is_apart else ''}",
            REFERENCES[2], layout.stage_size, config.pipeline, onward=True,
        ),
        Exchange("Tokens are gathered before each sublayer, and sums scattered behind it", TRAIN, 1, config.tensor),
        Exchange(
            "Keys and values go round in attention" if config.context_method == "ring"
            else "Tokens are exchanged for heads in attention",
            REFERENCES[1], config.tensor, config.context,
        ),
        Exchange("Tokens go to their experts and back", RUNS[3], 1, config.expert),
        Exchange(of_pieces.get(config.zero, whole), VALIDATION, config.tensor, pieces),
        Exchange(of_replicas, SCORE if pieces > 1 else VALIDATION, config.tensor * pieces, replicas),
    ]  # fmt: skip
    return [exchange for exchange in found if exchange.count > 1]


def draw_layout(step: SharedStep) -> Figure:
    """All ranks of a layout in a grid, or of each kind the first ones and the last; and the order of a pipeline."""
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
        blocks,
        row_gaps={index: slot.words for index, slot in enumerate(rows) if slot.words is not None},
        column_gaps={index: slot.words for index, slot in enumerate(columns) if slot.words is not None},
        row_names=_row_names(layout, down, blocks, places),
        column_names=_column_names(layout, blocks, places),
    )
    squares = (
        "Upper square of a rank: its layers, from top to bottom, and its share of their features, from left to right. "
        "Lower square: its rows of a step, from top to bottom, and its tokens of them, from left to right."
    )
    return layout_figure(_title(layout), grid, talks, [_KEPT[layout.config.zero], squares], _order(step))


def keep_layout(run: RunDirectory, record: RunRecord, words: str, step: SharedStep) -> None:
    """Writes the picture into the plots of a run that begins or goes on, and the words of its plan into its record."""
    save_png(draw_layout(step), run.plots / LAYOUT)
    replace(record, layout=words).write(run)


def forget_layout(run: RunDirectory, record: RunRecord) -> None:
    """Removes what a run had from several ranks, when it goes on with one."""
    if record.layout is not None:
        (run.plots / LAYOUT).unlink(missing_ok=True)
        replace(record, layout=None).write(run)


def add_layout(page: Page, run: RunDirectory, record: RunRecord) -> None:
    """Words and picture of the layout that a run had at its last start, if it had several ranks."""
    if record.layout is None:
        return
    page.add_section("Layout")
    page.add_text(record.layout)
    picture = run.plots / LAYOUT
    if picture.is_file():
        page.add_picture(picture.read_bytes(), "What each rank has, and which ranks talk to each other")


@dataclass(frozen=True)
class _Axis:
    """A dimension of the grid: `size` places for ranks `stride` apart, each for `wide` of the kind `name`."""

    name: str
    size: int
    stride: int
    wide: int = 1


@dataclass(frozen=True)
class _Slot:
    """A row or column, whose ranks begin with `rank`; with `words` it stands for others that are left out."""

    rank: int
    words: str | None = None


def _axes(layout: Layout) -> tuple[list[_Axis], list[_Axis]]:
    """What goes from left to right, and what from top to bottom, the widest apart first.

    Stages stand side by side, and data ranks below each other; tensor and context ranks where there is room for them.
    Without stages data ranks fill lines, of a copy each where there are several.
    """
    config, inner = layout.config, layout.config.tensor * layout.config.context
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
    """The rows or columns of `axes`, at most `most` with ranks: of an axis the first ones and the last."""
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
    """The cells of each group of which several are shown; from block to block, one way is enough."""
    groups = [[places[rank] for rank in group if rank in places] for group in exchange.groups(size)]
    return [group for group in groups if len(group) > 1]


def _blocks(layout: Layout, places: Mapping[int, Place]) -> list[tuple[Place, Place]]:
    """First and last place of the ranks that have the same layers and rows."""
    inner = layout.config.tensor * layout.config.context
    found: dict[int, list[Place]] = {}
    for rank, place in places.items():
        found.setdefault(rank // inner, []).append(place)
    return [(min(block), max(block)) for block in found.values()]


def _row_names(
    layout: Layout, down: Sequence[_Axis], blocks: Sequence[tuple[Place, Place]], places: Mapping[int, Place]
) -> dict[int, str]:
    if not down or down[0].name != "data rank" or down[0].stride > layout.config.tensor * layout.config.context:
        return {}
    ranks = {place: rank for rank, place in places.items()}
    first = {block[0][0]: ranks[block[0]] for block in blocks if block[0][1] == 0}
    return {row: f"data rank {_data_rank(layout, rank):,}" for row, rank in first.items()}


def _data_rank(layout: Layout, rank: int) -> int:
    return replace(layout, ranks=Ranks(rank, layout.ranks.size)).data_rank


def _column_names(layout: Layout, blocks: Sequence[tuple[Place, Place]], places: Mapping[int, Place]) -> dict[int, str]:
    config = layout.config
    if config.pipeline == 1:
        return {}
    ranks = {place: rank for rank, place in places.items()}
    found = {}
    for first, _ in blocks:
        stages = [stage + 1 for stage in config.stages_of(ranks[first] // layout.stage_size)]
        words = " and ".join(f"{stage:,}" for stage in stages)
        found[first[1]] = f"{'stage' if len(stages) == 1 else 'stages'} {words} of {config.num_stages:,}"
    return found


def _title(layout: Layout) -> str:
    config = layout.config
    sizes = {
        "pipeline": config.pipeline,
        "data": layout.num_data,
        "context": config.context,
        "tensor": config.tensor,
    }
    words = " times ".join(f"{size:,} {name}" for name, size in sizes.items() if size > 1)
    experts = f", groups of {config.expert:,} share experts" if config.expert > 1 else ""
    return f"{counted(layout.ranks.size, 'rank')}: {words}{experts}"


def _named(exchange: Exchange, size: int) -> str:
    """What is said, and in which groups: the first ones."""
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
    """Which piece is here of what is cut, and of which copy."""
    pieces = layout.num_pieces
    if pieces == 1:
        return []
    number, replicas = layout.ranks.rank % layout.stage_size // layout.config.tensor, layout.num_copies // pieces
    copy = f", copy {number // pieces + 1:,}" if replicas > 1 else ""
    return [f"piece {number % pieces + 1:,} of {pieces:,}{copy}"]


def _order(step: SharedStep) -> Order | None:
    """The order of a pipeline, of no more ranks and micro-batches than can be seen."""
    config, count = step.layout.config, step.num_micro_batches
    if not 1 < config.pipeline <= _MOST_STAGES:
        return None
    drawn = min(count, _MOST_MICRO_BATCHES // config.pipeline * config.pipeline)
    spans = timeline(config, drawn)
    end = max(span.end for span in spans)
    lost = f", waiting {waiting(spans):.0%} as long as computing" if drawn == count else ""
    begins = "" if end <= _SHOWN_UNITS else "; how it begins"
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


def _part(whole: range, number: int, count: int) -> range:
    """One of `count` equal parts."""
    each = len(whole) // count
    return range(whole.start + number * each, whole.start + (number + 1) * each)


def _short(numbers: range) -> str:
    """Numbers from 1 on."""
    return f"{numbers.start + 1:,}–{numbers.stop:,}" if len(numbers) > 1 else f"{numbers.start + 1:,}"


def _span(noun: str, *parts: range) -> str:
    is_one = len(parts) == 1 and len(parts[0]) == 1
    return f"{noun}{'' if is_one else 's'} {' and '.join(_short(part) for part in parts)}"


def _square(down: range, height: int, across: range, width: int) -> tuple[float, float, float, float]:
    """A part of a unit square: left, top, width and height."""
    return across.start / width, down.start / height, len(across) / width, len(down) / height
