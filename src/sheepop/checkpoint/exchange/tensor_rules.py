"""Maps our tensors to those of another program and back: names, shapes, and the layout of the numbers.

Layouts are reversible and depend only on shapes and configuration, so that a file can be checked before it is read.
They apply equally to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

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
    by_head: ClassVar[bool] = False
    """Whether rows are in another order, that of their heads."""

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


def _num_heads(config: ModelConfig) -> int:
    return config.num_heads


def _num_key_heads(config: ModelConfig) -> int:
    return 1 if config.gated_delta_net is None else config.gated_delta_net.num_key_heads


@dataclass(frozen=True)
class _Interleaved(Stacked):
    """Tensors interleaved by head, such as queries, keys and values: the rows of the first head of all, and so on."""

    heads: Callable[[ModelConfig], int] = _num_heads
    by_head = True

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        heads = [tensor.reshape(self.heads(config), -1, *tensor.shape[1:]) for tensor in ours]
        return [torch.cat(heads, dim=1).flatten(0, 1)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        count = self.heads(config)
        fused = theirs[0].reshape(count, -1, *theirs[0].shape[1:])
        return [part.flatten(0, 1) for part in torch.split(fused, [shape[0] // count for shape in shapes], dim=1)]


class Taps:
    """The taps (W, channels) of one or several convolutions, in theirs a kernel (channels, 1, W), its own tap last."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns one shape with the channels of all."""
        return [(sum(shape[1] for shape in ours), 1, ours[0][0])]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joins the channels, and reverses the taps."""
        return [torch.cat(list(ours), dim=1).flip(0).t()[:, None]]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Separates the channels."""
        return list(torch.split(theirs[0][:, 0].t().flip(0), [shape[1] for shape in shapes], dim=1))


class _RotaryPairs(Stacked):
    """The rows of queries or keys, if theirs rotates the columns (2i, 2i + 1) of a head in pairs, ours (i, i + R/2)."""

    by_head = True

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        return [regrouped(ours[0], config.head_size, config.rotary_dim, 2, config.rotary_dim // 2)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        return [regrouped(theirs[0], config.head_size, config.rotary_dim, config.rotary_dim // 2, 2)]


class _HeadPairs(_RotaryPairs):
    """The weights of norms of heads (H, C), or of one for all heads (C,), with the columns of `_RotaryPairs`."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        return [super().to_theirs([ours[0].flatten()], config)[0].view_as(ours[0])]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        return [super().to_ours([theirs[0].flatten()], shapes, config)[0].view_as(theirs[0])]


def regrouped(rows: Tensor, head_dim: int, rotated: int, groups: int, size: int) -> Tensor:
    """Returns (H C, ...) rows, of which the first `rotated` of each head are in `groups` of `size`, taken in turn."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    turned, rest = heads[:, :rotated], heads[:, rotated:]
    turned = turned.reshape(-1, groups, size, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, rest], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class RotaryLast(Stacked):
    """The rows of heads, or of `one_head`, whose rotated rows theirs has at the end, if `paired` as `ROTARY_PAIRS`."""

    by_head = True
    paired: bool = True
    one_head: bool = False

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Puts the rotated rows of each head at its end."""
        width = len(ours[0]) if self.one_head else config.head_size
        rows = regrouped(ours[0], width, config.rotary_dim, 2, config.rotary_dim // 2) if self.paired else ours[0]
        return [torch.unflatten(rows, 0, (-1, width)).roll(-config.rotary_dim, 1).flatten(0, 1)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Puts the rotated rows of each head at its beginning."""
        width = len(theirs[0]) if self.one_head else config.head_size
        rows = torch.unflatten(theirs[0], 0, (-1, width)).roll(config.rotary_dim, 1).flatten(0, 1)
        return [regrouped(rows, width, config.rotary_dim, config.rotary_dim // 2, 2) if self.paired else rows]


@dataclass(frozen=True)
class Behind(Stacked):
    """Rows that follow `skipped` rows which nothing reads, and which are written as zeros (OPT's positions)."""

    skipped: int = 0

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns the shape with the skipped rows."""
        return [(ours[0][0] + self.skipped, *ours[0][1:])]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Puts zeros before the rows."""
        return [torch.cat([ours[0].new_zeros(self.skipped, *ours[0].shape[1:]), ours[0]])]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Leaves the skipped rows out."""
        return [theirs[0][self.skipped :]]


@dataclass(frozen=True)
class _StackedExperts:
    """Experts in one tensor with the inputs before the outputs; several projections alternate in the outputs."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        count, outputs, *inputs = ours[0]
        return [(count, *inputs, len(ours) * outputs)]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        whole = torch.stack(list(ours), dim=2).flatten(1, 2)
        return [whole.transpose(1, -1)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        whole = theirs[0].transpose(1, -1)
        return list(whole.reshape(len(whole), -1, len(shapes), *whole.shape[2:]).unbind(2))


class _JoinedExperts:
    """Several projections of stacked experts (E, outputs, inputs) in one tensor, one behind the other."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Returns one shape with the outputs of all."""
        count, _, *inputs = ours[0]
        return [(count, sum(shape[1] for shape in ours), *inputs)]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joins the outputs."""
        return [torch.cat(list(ours), dim=1)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Separates the outputs."""
        return list(torch.split(theirs[0], [shape[1] for shape in shapes], dim=1))


class _PerExpert:
    """One of our tensors, which stacks all experts (or heads) in its first dimension, and one of theirs for each."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return [ours[0][1:]] * ours[0][0]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        return list(ours[0].unbind())

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        return [torch.stack(list(theirs))]


class _Absent:
    """One of our tensors without a counterpart, which must be zero."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        return []

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        if any(tensor.any() for tensor in ours):
            raise CheckpointError("the router's balance is not zero, which changes the choice of experts")
        return []

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        return [torch.zeros(shape) for shape in shapes]


SAME = Stacked()
TRANSPOSED = Stacked(transposed=True)
INTERLEAVED = _Interleaved()
BY_KEY_HEAD = _Interleaved(heads=_num_key_heads)
TAPS = Taps()
ROTARY_PAIRS = _RotaryPairs()
HEAD_PAIRS = _HeadPairs()
PER_EXPERT = _PerExpert()
JOINED_EXPERTS = _JoinedExperts()
STACKED_EXPERTS = _StackedExperts()
ABSENT = _Absent()
QUERY_KEY_VALUE = tuple(f"blocks.{{layer}}.attention.{letter}_proj" for letter in "qkv")


@dataclass(frozen=True)
class TensorRule:
    """A map of tensor names with ``{layer}``, theirs also with ``{expert}``; it applies if all of ours exist.

    If several rules apply to a tensor, the last one counts. `beside` is another of our tensors that must exist.
    """

    ours: tuple[str, ...]
    theirs: str
    layout: Layout = SAME
    beside: str = ""


@dataclass(frozen=True)
class TensorGroup:
    """Some of our tensors by name and shape, and their tensors with the same numbers."""

    ours: Mapping[str, Shape]
    theirs: Mapping[str, Shape]
    layout: Layout


def same(ours: str, theirs: str, *, layout: Layout = SAME) -> tuple[TensorRule, ...]:
    """Returns rules for the weight and the bias of a layer."""
    return fused((ours,), theirs, layout)


def fused(ours: Sequence[str], theirs: str, layout: Layout = SAME) -> tuple[TensorRule, ...]:
    """Returns rules for the weights and biases of several of our layers in one of theirs."""
    kinds = ("weight", "bias")
    return tuple(TensorRule(tuple(f"{name}.{kind}" for name in ours), f"{theirs}.{kind}", layout) for kind in kinds)


def under(ours: str, theirs: str, *names: str, layout: Layout = SAME, **renamed: str) -> tuple[TensorRule, ...]:
    """Returns rules for weights and biases of layers below `ours` and `theirs`: `names` in both, or ours=theirs."""
    pairs = {**dict.fromkeys(names), **renamed}
    return tuple(
        rule
        for name, other in pairs.items()
        for rule in same(f"{ours}.{name}", f"{theirs}.{other or name}", layout=layout)
    )


def groups(rules: Sequence[TensorRule], expected: Mapping[str, Shape], config: ModelConfig) -> Iterator[TensorGroup]:
    """Applies each rule to each layer that has its tensors, in the order of `expected`."""
    found: dict[str, TensorGroup] = {}
    for rule in rules:
        for layer in range(config.num_layers if "{layer}" in rule.ours[0] else 1):
            names = [name.replace("{layer}", str(layer)) for name in rule.ours]
            beside = rule.beside.replace("{layer}", str(layer))
            if all(name in expected for name in (*names, *([beside] if beside else []))):
                ours = {name: expected[name] for name in names}
                shapes = rule.layout.shapes(list(ours.values()))
                pattern = rule.theirs.replace("{layer}", str(layer))
                theirs = {pattern.replace("{expert}", str(number)): shape for number, shape in enumerate(shapes)}
                found[names[0]] = TensorGroup(ours, theirs, rule.layout)
    return (found[name] for name in expected if name in found)


BLOCK = "blocks.{layer}"
EXPERTS = "blocks.{layer}.feed_forward"


def router(theirs: str) -> tuple[TensorRule, ...]:
    """Returns rules for a router; only SheepOp has a balance of the loads."""
    return (*same(f"{EXPERTS}.router", theirs), TensorRule((f"{EXPERTS}.router.balance",), "", ABSENT))


def experts(place: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Returns rules for a mixture of experts; `names` maps our names of the projections (gate, up, down) to theirs."""
    return (
        *router(f"{place}.gate"),
        *(
            TensorRule((f"{EXPERTS}.experts.{ours}_proj",), f"{place}.experts.{{expert}}.{theirs}.weight", PER_EXPERT)
            for ours, theirs in names.items()
        ),
    )


def to_ours(
    groups: Sequence[TensorGroup], theirs: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Converts their tensors, whose names and shapes were checked, to ours."""
    found: dict[str, LazyTensor] = {}
    for group in groups:
        convert = partial(group.layout.to_ours, shapes=list(group.ours.values()), config=config)
        found |= _converted(convert, group.theirs, group.ours, theirs)
    return found


def to_theirs(
    groups: Sequence[TensorGroup], ours: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Converts our tensors to theirs; raises `CheckpointError` for a nonzero tensor without a counterpart."""
    found: dict[str, LazyTensor] = {}
    for group in groups:
        convert = partial(group.layout.to_theirs, config=config)
        if not group.theirs:
            convert([ours[name].read() for name in group.ours])
        found |= _converted(convert, group.ours, group.theirs, ours)
    return found


def _converted(
    convert: Callable[[list[Tensor]], list[Tensor]],
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    tensors: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    inputs = [tensors[name] for name in sources]
    dtypes = {tensor.dtype for tensor in inputs} or {torch.float32}
    if len(dtypes) > 1:
        raise CheckpointError(f"{', '.join(sources)} are stored as one tensor, but have different dtypes.")

    def read(place: int) -> Tensor:
        return convert([tensor.read() for tensor in inputs])[place]

    parts = enumerate(targets.items())
    return {name: LazyTensor(shape, next(iter(dtypes)), partial(read, place)) for place, (name, shape) in parts}
