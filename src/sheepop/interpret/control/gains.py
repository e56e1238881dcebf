"""Gains: by how much a network enlarges a small change of its residual stream, block by block and part by part, and
what of them changed between two models.

Shapes: T tokens, D d_model, L layers, V vocab. The stream before block l is h_l, that after the last block h_L.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line
from sheepop.interpret.control.finding import PromptFinding, columns, heat_map, lines_by_layer
from sheepop.interpret.control.influence import influences
from sheepop.interpret.control.jacobian import Interval, LinearMap, Spectrum, probed, singular_values, typical_gain
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture

_STEPS_OF_PARTS, _STEPS_COMPARED = 12, 16
_CHANGES_SHOWN = 8
_NAMED = 3  # blocks that are named in words
_STRONG = 3.0  # the largest gain of a block, relative to its typical one, from which words name it


@dataclass(frozen=True, eq=False)
class Gain:
    """The gain of one part: the `largest` factor of any direction, and the `typical` one of a random direction."""

    name: str
    spectrum: Spectrum
    typical: Interval

    @property
    def largest(self) -> float:
        """The estimate of the largest singular value."""
        return self.spectrum.largest[0].value

    @property
    def smallest(self) -> float:
        """The estimate of the smallest singular value."""
        return self.spectrum.smallest[0].value


@dataclass(frozen=True, eq=False)
class BlockGains:
    """The gains of a block and of its `parts`. `focus` is the token that most of the largest direction lies at.

    `focus_share` is the share of the direction's squared length there. `reached` is the typical gain from the
    embeddings to the stream behind the block.
    """

    block: Gain
    parts: tuple[Gain, ...]
    focus: int
    focus_share: float
    reached: Interval

    @property
    def by_name(self) -> dict[str, Gain]:
        """The gains of the parts and of the block itself by name."""
        return {gain.name: gain for gain in (self.block, *self.parts)}


@dataclass(frozen=True, eq=False)
class Gains(PromptFinding):
    """The gains of every block of a network, of all blocks together, and of the output.

    `product` is the product of the blocks' largest gains, which bounds that of the `whole`. `head` maps the stream
    after the last block at the last token, and `nats` (L + 1, T) the stream before each block at each token, to the
    prediction after the last token: a change of length e changes the prediction by ``1/2 (gain e)^2`` nats.
    `lengths` (L + 1,) are the mean lengths of the stream's vectors before each block and after the last.
    """

    verb: ClassVar[str] = "gains"
    derived: ClassVar[tuple[str, ...]] = ("labels", "product", "relative")
    blocks: tuple[BlockGains, ...]
    whole: Gain
    head: Gain
    nats: Tensor
    lengths: Tensor

    @property
    def product(self) -> float:
        """The product of the blocks' largest gains."""
        return math.prod(found.block.largest for found in self.blocks)

    @property
    def relative(self) -> list[float]:
        """The typical gain of each block for changes that are measured in lengths of the stream."""
        ratios = (self.lengths[:-1] / self.lengths[1:]).tolist()
        return [found.block.typical.value * ratio for found, ratio in zip(self.blocks, ratios, strict=True)]

    @property
    def part_names(self) -> list[str]:
        """The names of the parts that any block has, in the order in which they run."""
        return list(dict.fromkeys(part.name for found in self.blocks for part in found.parts))

    def table(self) -> list[str]:
        """A line for each block: its gains, that from the embeddings, and the largest gain of each part."""
        head = ["block", "largest:.3f", "residual:.0e", "smallest:.3f", "typical:.3f", "95 percent", "relative:.3f"]
        rows, parts = [], []
        for layer, (found, length) in enumerate(zip(self.blocks, self.lengths[1:].tolist(), strict=True)):
            own, typical = found.block, found.block.typical
            interval = f"{typical.low:.3f} to {typical.high:.3f}"
            ends = own.largest, own.spectrum.largest[0].residual, own.smallest
            rows.append([layer, *ends, typical.value, interval, self.relative[layer], found.reached.value, length])
            parts.append([layer, *(both(found.by_name.get(name)) for name in self.part_names)])
        table = columns([*head, "from embedding:.3f", "length:.3g"], rows)
        return [*table, "", "Largest and typical gain of each part:", *columns(["block", *self.part_names], parts)]

    def sentences(self) -> list[str]:
        """What stands out."""
        order = sorted(enumerate(self.blocks), key=lambda each: -each[1].block.largest)
        strong = [each for each in order[1:] if each[1].block.largest > _STRONG * each[1].block.typical.value]
        found = [
            f"Block {layer} multiplies by {gains.block.largest:.3g} along one direction, {gains.focus_share:.0%} of "
            f"which lies at {self.named(gains.focus)}, and by {gains.block.typical.value:.3g} along a random one."
            for layer, gains in sorted([order[0], *strong[: _NAMED - 1]], key=lambda each: each[0])
        ]
        if more := len(strong[_NAMED - 1 :]):
            found.append(
                f"{counted(more, 'more block')} {'multiplies' if more == 1 else 'multiply'} one direction more than "
                f"{_STRONG:.0f} times as much as a random one."
            )
        whole = self.whole
        return [
            *found,
            f"All blocks together multiply by {whole.largest:.3g} along one direction and by {whole.typical.value:.3g} "
            f"along a random one. The product of the blocks' largest gains is {self.product:.3g}; their directions "
            "would have to be aligned to reach it.",
            f"A change of length e of the last vector changes the next-token prediction by at most "
            f"{self.head.largest**2 / 2:.3g} e^2 nats.",
        ]

    def pictures(self) -> Iterator[Picture]:
        """The gains by layer, the largest gain of every part, and the gain in nats of every layer and token."""
        drawn = {
            "Largest": [found.block.largest for found in self.blocks],
            "Typical": [found.block.typical.value for found in self.blocks],
            "Typical from the embeddings": [found.reached.value for found in self.blocks],
            "Smallest found": [found.block.smallest for found in self.blocks],
        }
        yield lines_by_layer("gains_by_block", "Gain of each block", drawn, "Gain")
        names = ["block", *self.part_names]
        table = [[getattr(found.by_name.get(name), "largest", math.nan) for name in names] for found in self.blocks]
        rows = [f"block {layer}" for layer in range(len(self.blocks))]
        yield heat_map("gains_of_parts", "Largest gain of each part", torch.tensor(table), rows, names, "Gain")
        title, rows = "What a change does to the next token", [*(f"before {row}" for row in rows), "after the last"]
        meaning = "Typical gain in root nats"
        yield heat_map("gains_in_nats", title, self.nats, rows, self.labels, meaning, decades=3)


def gains(point: OperatingPoint, *, steps: int = 32, probes: int = 8, seed: int = 0) -> Gains:
    """Measures the gains of every block at an operating point.

    `steps` bounds those of the search for singular values (12 for the parts of a block), `probes` is the number of
    random directions for each typical gain.
    """
    reached = _reached(point, probes, seed)
    blocks = tuple(_block(point, layer, reached[layer], steps, probes, seed) for layer in range(point.num_layers))
    whole = gain_of("whole", point.between(0, point.num_layers), steps, probes, seed)
    head = point.derivative(point.read_in_nats, point.states[-1][-1:])
    return Gains(
        point.notes,
        point.tokens,
        blocks,
        whole,
        gain_of("head", head, steps, probes, seed),
        _in_nats(point, probes, seed),
        point.states.norm(dim=-1).mean(1),
    )


def gain_of(name: str, jacobian: LinearMap, steps: int, probes: int, seed: int, *, count: int = 3) -> Gain:
    """Measures the gain of a part, with `count` singular values at either end of its spectrum."""
    return Gain(name, singular_values(jacobian, count, steps, seed=seed), typical_gain(jacobian, probes, seed))


def both(gain: Gain | None) -> str:
    """The largest and the typical gain for a table, a dash if there is none."""
    return "-" if gain is None else f"{gain.largest:.3f} / {gain.typical.value:.3f}"


def _block(point: OperatingPoint, layer: int, reached: Interval, steps: int, probes: int, seed: int) -> BlockGains:
    block = gain_of("block", point.between(layer, layer + 1), steps, probes, seed)
    found = parts_of_block(point, layer, min(steps, _STEPS_OF_PARTS), probes, seed)
    shares = block.spectrum.direction.square().sum(-1)
    return BlockGains(block, found, int(shares.argmax()), float(shares.max()), reached)


def parts_of_block(point: OperatingPoint, layer: int, steps: int, probes: int, seed: int) -> tuple[Gain, ...]:
    """The gains of the mixer, the feed-forward network and the norms of a block."""
    parts = {
        "attention" if point.stream.blocks[layer].attention is not None else "mixer": point.part(
            layer, "attention_input", "attention_output"
        ),
        "feed-forward": point.part(layer, "feed_forward_input", "feed_forward_output"),
        **{name.replace("feed_", "feed-").replace("_", " "): norm for name, norm in point.norms(layer).items()},
    }
    return tuple(gain_of(name, jacobian, steps, probes, seed) for name, jacobian in parts.items())


def _reached(point: OperatingPoint, probes: int, seed: int) -> list[Interval]:
    """Returns the typical gains from the embeddings to the stream after each block."""
    stacked = point.derivative(lambda x_TD: torch.cat(point.through(x_TD[None])), point.states[0])
    size = point.states[0].numel()
    found = [each.sum((1, 2)) / size for each in probed(stacked.jvp, point.states[0], probes, seed, "reached")]
    return [Interval.of_root(squares) for squares in torch.stack(found, 1)]


def _in_nats(point: OperatingPoint, probes: int, seed: int) -> Tensor:
    """Returns the typical gains (L + 1, T) from the stream before each block, at each token, to the next prediction."""
    first = point.states[:1].clone().requires_grad_()
    with torch.enable_grad():
        streams = [first, *point.through(first)]
        value = point.read_in_nats(streams[-1][0, -1:])

    def pulled(cotangent: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(value, streams, cotangent, retain_graph=True))

    squares = sum(each.mean(-1).cpu() for each in probed(pulled, value, probes, seed, "nats"))
    return cast("Tensor", squares / probes).sqrt()


@dataclass(frozen=True, eq=False)
class GainChanges(PromptFinding):
    """The gains of the blocks of two models, `first` and `second`, and of all blocks together, which come last.

    `influence` (2, T) are the influences of every token on the last state in both, and `error` (2, T) half their
    intervals, relative to them.
    """

    verb: ClassVar[str] = "compare"
    first: tuple[Gain, ...]
    second: tuple[Gain, ...]
    influence: Tensor
    error: Tensor

    @property
    def names(self) -> list[str]:
        """The names of what has gains."""
        return [*(f"block {layer}" for layer in range(len(self.first) - 1)), "all blocks"]

    def is_clear(self, token: int) -> bool:
        """Returns whether the intervals of a token's two influences do not overlap."""
        before, after = self.influence[:, token]
        return bool((after - before).abs() > self.influence[:, token] @ self.error[:, token])

    def table(self) -> list[str]:
        """The gains of both models, and the influences that changed most."""
        rows = [
            [name, a.largest, b.largest, a.typical.value, b.typical.value]
            for name, a, b in zip(self.names, self.first, self.second, strict=True)
        ]
        ratio, changed = (self.influence[1] / self.influence[0]).log().abs().nan_to_num(0.0), []
        for token in ratio.argsort(descending=True)[:_CHANGES_SHOWN].tolist():
            pairs = zip(self.influence[:, token].tolist(), self.error[:, token].tolist(), strict=True)
            both_models = (f"{value:.3g} (±{error:.0%})" for value, error in pairs)
            clear = "yes" if self.is_clear(token) else "no"
            changed.append([visible_line(self.tokens[token]), token, *both_models, clear])
        table = columns(["gain", "largest:.3f", "then:.3f", "typical:.3f", "then:.3f"], rows)
        head = ["token", "position", "first", "second", "beyond the error"]
        return [*table, "", "Influence on the last state:", *columns(head, changed)]

    def sentences(self) -> list[str]:
        """The gain and the number of influences that changed."""
        pairs = list(zip(self.names, self.first, self.second, strict=True))
        name, a, b = max(pairs[:-1], key=lambda pair: abs(pair[2].largest - pair[1].largest) / pair[1].largest)
        clear = sum(self.is_clear(token) for token in range(len(self.tokens)))
        return [
            f"The largest gain that changed most is that of {name}, from {a.largest:.4g} to {b.largest:.4g} "
            f"({b.largest / a.largest - 1:+.1%}).",
            f"The influence of {clear} of {counted(len(self.tokens), 'token')} on the last state changed by more than "
            "the error of the estimates.",
        ]

    def pictures(self) -> Iterator[Picture]:
        """The gains of the blocks of both models."""
        lines = {
            f"{kind}, {name} model": [gain.largest if kind == "Largest" else gain.typical.value for gain in gains[:-1]]
            for kind in ("Largest", "Typical")
            for name, gains in (("first", self.first), ("second", self.second))
        }
        yield lines_by_layer("compare", "Gain of each block", lines, "Gain")


def compare_points(first: OperatingPoint, second: OperatingPoint, *, probes: int = 8, seed: int = 0) -> GainChanges:
    """Compares two models at the same prompt, with the same random directions.

    Raises `UsageError` if they read other tokens, or do not have as many blocks of the same width.
    """
    if first.trace.token_ids != second.trace.token_ids:
        raise UsageError("The two models split the prompt into other tokens. Compare models with the same tokenizer.")
    if first.states.shape != second.states.shape:
        shapes = [f"{point.num_layers} blocks of width {point.model.config.d_model}" for point in (first, second)]
        raise UsageError(f"The first model has {shapes[0]}, the second {shapes[1]}. Compare models of one shape.")
    ends = [(layer, layer + 1) for layer in range(first.num_layers)] + [(0, first.num_layers)]
    gains = [
        tuple(gain_of("gain", point.between(*pair), _STEPS_COMPARED, probes, seed) for pair in ends)
        for point in (first, second)
    ]
    last = [first.num_tokens - 1]
    reached = [influences(point.between(0, first.num_layers), probes, seed, last) for point in (first, second)]
    values, errors = (torch.cat(list(each)) for each in zip(*reached, strict=True))
    notes = [note for note in first.notes if note in second.notes]
    for name, own, others in (("first", first.notes, second.notes), ("second", second.notes, first.notes)):
        notes += [f"The {name} model: {note}" for note in own if note not in others]
    return GainChanges(tuple(notes), first.tokens, gains[0], gains[1], values, errors)
