"""How tensors of one program lie in those of another: reversible, a function of shapes and configuration alone.

Shapes and tensors go through the same class, so that a file can be checked before it is read. What holds for weights
holds for their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig


class Layout(Protocol):
    """Some of our tensors and the tensors in which another program stores the same numbers."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """The shapes of their tensors for the shapes of ours."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Their tensors; views where that is possible."""

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Our tensors, of `shapes`; views where that is possible."""


@dataclass(frozen=True)
class Stacked:
    """One or several of ours, one below the other, are one of theirs; `transposed` where it is (in, out)."""

    transposed: bool = False

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """As many rows as ours have together."""
        whole = (sum(shape[0] for shape in ours), *ours[0][1:])
        return [whole[::-1] if self.transposed else whole]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """The one tensor."""
        whole = ours[0] if len(ours) == 1 else torch.cat(list(ours))
        return [whole.t() if self.transposed else whole]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Its parts."""
        whole = theirs[0].t() if self.transposed else theirs[0]
        return list(torch.split(whole, [shape[0] for shape in shapes]))


@dataclass(frozen=True)
class Interleaved:
    """Queries, keys and values of each head in turn: rows (H, 3, C), all heads having keys of their own."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """As many rows as ours have together."""
        return Stacked().shapes(ours)

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """The one tensor."""
        heads = [tensor.reshape(config.num_heads, -1, *tensor.shape[1:]) for tensor in ours]
        return [torch.stack(heads, dim=1).flatten(0, 2)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Queries, keys, values."""
        fused = theirs[0].reshape(config.num_heads, len(shapes), -1, *theirs[0].shape[1:])
        return [part.flatten(0, 1) for part in fused.unbind(1)]


@dataclass(frozen=True)
class PerExpert:
    """One of ours holds all experts along its first dimension, of which each is one of theirs."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """The shape of one expert, for each."""
        return [ours[0][1:]] * ours[0][0]

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """The experts."""
        return list(ours[0].unbind())

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """All experts in one."""
        return [torch.stack(list(theirs))]


@dataclass(frozen=True)
class Absent:
    """Ours must be zero, since they have no such tensor."""

    def shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """None."""
        return []

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Nothing; raises `CheckpointError` when something would be lost."""
        if any(tensor.any() for tensor in ours):
            raise CheckpointError("the router's balance is not zero, which changes the choice of experts")
        return []

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Zeros, in float32."""
        return [torch.zeros(shape) for shape in shapes]


SAME = Stacked()
TRANSPOSED = Stacked(transposed=True)
INTERLEAVED = Interleaved()
PER_EXPERT = PerExpert()
ABSENT = Absent()
