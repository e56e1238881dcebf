"""Maps our tensors to those of another program and back: names, shapes, and the layout of the numbers.

Layouts are reversible and depend only on shapes and configuration, so that a file can be checked before it is read.
They apply equally to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import LazyTensor, Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig


class Layout(Protocol):
    """The relation between some of our tensors and the tensors in which another program stores the same numbers."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns the shapes of their tensors for the shapes of ours."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Converts our tensors to theirs, as views if possible."""

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Converts their tensors to ours with these shapes, as views if possible."""


@dataclass(frozen=True)
class Stacked:
    """The rows of one or several of our tensors in one of theirs; `transposed` if theirs is (in, out)."""

    transposed: bool = False

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns one shape with the total number of rows."""
        whole = (sum(shape[0] for shape in ours), *ours[0][1:])
        return [whole[::-1] if self.transposed else whole]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Concatenates the rows."""
        whole = ours[0] if len(ours) == 1 else torch.cat(list(ours))
        return [whole.t() if self.transposed else whole]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Splits the rows."""
        whole = theirs[0].t() if self.transposed else theirs[0]
        return list(torch.split(whole, [shape[0] for shape in shapes]))


@dataclass(frozen=True)
class Interleaved:
    """Queries, keys and values interleaved by head: rows (H, 3, C); each query head has its own key head."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns one shape with the total number of rows."""
        return Stacked().shapes(ours)

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Interleaves the tensors head by head."""
        heads = [tensor.reshape(config.num_heads, -1, *tensor.shape[1:]) for tensor in ours]
        return [torch.stack(heads, dim=1).flatten(0, 2)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Separates queries, keys and values."""
        fused = theirs[0].reshape(config.num_heads, len(shapes), -1, *theirs[0].shape[1:])
        return [part.flatten(0, 1) for part in fused.unbind(1)]


@dataclass(frozen=True)
class PerExpert:
    """One of our tensors, which stacks all experts in its first dimension, and one of theirs for each expert."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns one shape for each expert."""
        return [ours[0][1:]] * ours[0][0]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Splits the experts."""
        return list(ours[0].unbind())

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Stacks the experts."""
        return [torch.stack(list(theirs))]


@dataclass(frozen=True)
class Absent:
    """One of our tensors without a counterpart, which must be zero."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns no shapes."""
        return []

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Returns no tensors; raises `CheckpointError` if ours is not zero."""
        if any(tensor.any() for tensor in ours):
            raise CheckpointError("the router's balance is not zero, which changes the choice of experts")
        return []

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Returns zeros in float32."""
        return [torch.zeros(shape) for shape in shapes]


SAME = Stacked()
TRANSPOSED = Stacked(transposed=True)
INTERLEAVED = Interleaved()
PER_EXPERT = PerExpert()
ABSENT = Absent()
_KINDS = ("weight", "bias")


@dataclass(frozen=True)
class TensorRule:
    """A map of tensor names with ``{layer}``, theirs also with ``{expert}``; it applies if all of ours exist."""

    ours: tuple[str, ...]
    theirs: str
    layout: Layout = SAME


@dataclass(frozen=True)
class TensorGroup:
    """Some of our tensors by name and shape, and their tensors with the same numbers."""

    ours: Mapping[str, Shape]
    theirs: Mapping[str, Shape]
    layout: Layout


def same(ours: str, theirs: str, *, layout: Layout = SAME) -> tuple[TensorRule, ...]:
    """Returns rules for the weight and the bias of a layer."""
    return tuple(TensorRule((f"{ours}.{kind}",), f"{theirs}.{kind}", layout) for kind in _KINDS)


def fused(ours: Sequence[str], theirs: str, layout: Layout) -> tuple[TensorRule, ...]:
    """Returns rules for the weights and biases of several of our layers in one of theirs."""
    return tuple(TensorRule(tuple(f"{name}.{kind}" for name in ours), f"{theirs}.{kind}", layout) for kind in _KINDS)


def groups(rules: Sequence[TensorRule], expected: Mapping[str, Shape], config: ModelConfig) -> Iterator[TensorGroup]:
    """Applies each rule to each layer that has its tensors, in the order of `expected`."""
    places = {name: place for place, name in enumerate(expected)}
    found = []
    for rule in rules:
        layers: Sequence[int] = range(config.num_layers) if "{layer}" in rule.ours[0] else (0,)
        for layer in layers:
            names = [name.replace("{layer}", str(layer)) for name in rule.ours]
            if all(name in expected for name in names):
                found.append((places[names[0]], _group(rule, names, layer, expected)))
    found.sort(key=lambda entry: entry[0])
    return (group for _, group in found)


def _group(rule: TensorRule, names: Sequence[str], layer: int, expected: Mapping[str, Shape]) -> TensorGroup:
    ours = {name: expected[name] for name in names}
    shapes = rule.layout.shapes(list(ours.values()))
    pattern = rule.theirs.replace("{layer}", str(layer))
    theirs = {pattern.replace("{expert}", str(number)): shape for number, shape in enumerate(shapes)}
    return TensorGroup(ours, theirs, rule.layout)


def experts(router: str, expert: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Returns rules for a mixture of experts; `names` maps our names of the projections (gate, up, down) to theirs."""
    here = "blocks.{layer}.feed_forward"
    return (
        TensorRule((f"{here}.router.weight",), f"{router}.weight"),
        TensorRule((f"{here}.router.balance",), "", ABSENT),
        *(
            TensorRule((f"{here}.experts.{ours}_proj",), f"{expert}.{theirs}.weight", PER_EXPERT)
            for ours, theirs in names.items()
        ),
    )


QUERY_KEY_VALUE = tuple(f"blocks.{{layer}}.attention.{letter}_proj" for letter in "qkv")


def interleaved_attention(theirs: str) -> tuple[TensorRule, ...]:
    """Returns rules for queries, keys and values interleaved by head (GPT-NeoX, BLOOM)."""
    return fused(QUERY_KEY_VALUE, theirs, INTERLEAVED)


def stacked(ours: Sequence[str], theirs: str, *, transposed: bool = False) -> tuple[TensorRule, ...]:
    """Returns rules for several of our layers whose rows are stacked in one of theirs."""
    return fused(ours, theirs, Stacked(transposed))


def to_ours(
    groups: Sequence[TensorGroup], theirs: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Converts their tensors, whose names and shapes were checked, to ours."""

    def forward(group: TensorGroup, tensors: list[Tensor]) -> list[Tensor]:
        return group.layout.to_ours(tensors, list(group.ours.values()), config)

    return _convert([(group, group.theirs, group.ours) for group in groups], theirs, forward)


def to_theirs(
    groups: Sequence[TensorGroup], ours: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Converts our tensors to theirs; raises `CheckpointError` for a nonzero tensor without a counterpart."""

    def backward(group: TensorGroup, tensors: list[Tensor]) -> list[Tensor]:
        return group.layout.to_theirs(tensors, config)

    for group in groups:
        if not group.theirs:
            backward(group, [ours[name].read() for name in group.ours])
    return _convert([(group, group.ours, group.theirs) for group in groups], ours, backward)


def _convert(
    groups: Sequence[tuple[TensorGroup, Mapping[str, Shape], Mapping[str, Shape]]],
    tensors: Mapping[str, LazyTensor],
    convert: Callable[[TensorGroup, list[Tensor]], list[Tensor]],
) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for group, sources, targets in groups:
        inputs = [tensors[name] for name in sources]
        dtypes = {tensor.dtype for tensor in inputs} or {torch.float32}
        if len(dtypes) > 1:
            raise CheckpointError(f"{', '.join(sources)} are stored as one tensor, but have different dtypes.")
        for place, (name, shape) in enumerate(targets.items()):
            found[name] = LazyTensor(shape, next(iter(dtypes)), _reader(group, inputs, place, convert))
    return found


def _reader(
    group: TensorGroup,
    inputs: list[LazyTensor],
    place: int,
    convert: Callable[[TensorGroup, list[Tensor]], list[Tensor]],
) -> Callable[[], Tensor]:
    return lambda: convert(group, [tensor.read() for tensor in inputs])[place]
