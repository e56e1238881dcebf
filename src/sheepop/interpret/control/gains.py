"""Gains: by how much a network enlarges a small change of its residual stream, block by block and part by part.

Shapes: T tokens, D d_model, L layers, V vocab. The stream before block l is h_l, that after the last block h_L.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from sheepop.core.facts import counted
from sheepop.interpret.control.drawing import heat_map, lines_by_layer
from sheepop.interpret.control.finding import PromptFinding, columns
from sheepop.interpret.control.jacobian import Interval, LinearMap, Spectrum, probed, singular_values, typical_gain
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture, labels_of

_STEPS_OF_PARTS = 12
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
    derived: ClassVar[tuple[str, ...]] = ("product", "relative")
    labels: list[str]
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
        head = [
            "block",
            "largest",
            "residual",
            "smallest",
            "typical",
            "95 percent",
            "relative",
            "from embedding",
            "length",
        ]
        rows = [
            [
                str(layer),
                f"{found.block.largest:.3f}",
                f"{found.block.spectrum.largest[0].residual:.0e}",
                f"{found.block.smallest:.3f}",
                f"{found.block.typical.value:.3f}",
                f"{found.block.typical.low:.3f} to {found.block.typical.high:.3f}",
                f"{self.relative[layer]:.3f}",
                f"{found.reached.value:.3f}",
                f"{float(self.lengths[layer + 1]):.3g}",
            ]
            for layer, found in enumerate(self.blocks)
        ]
        parts = [
            [str(layer), *(both(found.by_name.get(name)) for name in self.part_names)]
            for layer, found in enumerate(self.blocks)
        ]
        words = "Largest and typical gain of each part:"
        return [*columns(head, rows), "", words, *columns(["block", *self.part_names], parts)]

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
        labels_of(point.trace),
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
    stacked = point.derivative(lambda x_TD: torch.cat(point.run(0, point.num_layers, x_TD[None])), point.states[0])
    size = point.states[0].numel()
    found = [each.sum((1, 2)) / size for each in probed(stacked.jvp, point.states[0], probes, seed, "reached")]
    return [Interval.of_root(squares) for squares in torch.stack(found, 1)]


def _in_nats(point: OperatingPoint, probes: int, seed: int) -> Tensor:
    """Returns the typical gains (L + 1, T) from the stream before each block, at each token, to the next prediction."""
    first = point.states[:1].clone().requires_grad_()
    with torch.enable_grad():
        streams = [first, *point.run(0, point.num_layers, first)]
        value = point.read_in_nats(streams[-1][0, -1:])

    def pulled(cotangent: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(value, streams, cotangent, retain_graph=True))

    squares = sum(each.mean(-1).cpu() for each in probed(pulled, value, probes, seed, "nats"))
    return cast("Tensor", squares / probes).sqrt()
