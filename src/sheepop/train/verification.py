"""Detection of silent corruption: a step that is computed twice must give the same bits."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sheepop.model import LossSums


class Recomputation:
    """Compares the losses and the gradients of two computations of a step.

    `differences` has a line for each loss or gradient that differs in any bit: where, and by how much.
    """

    def __init__(self, model: nn.Module) -> None:
        self.differences: list[str] = []
        self._model = model
        self._losses: list[float] = []
        self._gradients: dict[str, Tensor] = {}

    def take(self, found: Sequence[LossSums]) -> None:
        """Takes the losses of the first computation, and its gradients, which it removes from the model."""
        self._losses = [float(losses.objective) for losses in found]
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._gradients[name], parameter.grad = parameter.grad.to_dense(), None

    def compare(self, found: Sequence[LossSums]) -> None:
        """Compares them with the losses and gradients of the second computation, and frees them."""
        for before, losses in zip(self._losses, found, strict=True):
            now = float(losses.objective)
            if struct.pack("d", before) != struct.pack("d", now):
                self.differences.append(f"loss: {before!r}, then {now!r}")
        for name, parameter in self._model.named_parameters():
            first = self._gradients.pop(name, None)
            if (first is None) != (parameter.grad is None):
                self.differences.append(f"{name}: only one of the computations gave a gradient")
            elif first is not None and parameter.grad is not None:
                second = parameter.grad.to_dense()
                if not torch.equal(_bits(first), _bits(second)):
                    self.differences.append(f"{name}: {_described(first, second)}")


def _bits(tensor: Tensor) -> Tensor:
    """The bits as integers, because as numbers NaN differs from itself and 0 equals -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _described(one: Tensor, other: Tensor) -> str:
    differ = _bits(one) != _bits(other)
    count = int(differ.sum())
    position = tuple(int(index) for index in differ.nonzero()[0])
    largest = float((one.double() - other.double()).abs().nan_to_num(nan=float("inf")).max())
    return (
        f"{count:,} of {one.numel():,} values differ, by at most {largest:.3g}; the first is at {list(position)}, "
        f"{one[position].item()!r}, then {other[position].item()!r}"
    )
