"""All tensors of a model from one program's names and layout to the other's, unread until they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.tensor_rules import TensorGroup, groups
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.lazy_tensor import LazyTensor, Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig


def tensor_groups(family: Family, config: ModelConfig) -> list[TensorGroup]:
    """Every tensor of a model of this family, in the order of the network.

    Raises `CheckpointError` for a tensor of ours that the family has no place for.
    """
    expected = expected_tensors(config)
    found = list(groups(family.tensors, expected, config))
    placed = {name for group in found for name in group.ours}
    if homeless := [name for name in expected if name not in placed]:
        raise CheckpointError(f"{family.model_type} has no place for {', '.join(homeless[:20])}.")
    return found


def to_ours(
    groups: Sequence[TensorGroup], theirs: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Our tensors from theirs, whose names and shapes have been checked."""

    def forward(group: TensorGroup, tensors: list[Tensor]) -> list[Tensor]:
        return group.layout.to_ours(tensors, list(group.ours.values()), config)

    return _convert([(group, group.theirs, group.ours) for group in groups], theirs, forward)


def to_theirs(
    groups: Sequence[TensorGroup], ours: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Their tensors from ours. Raises `CheckpointError` for a tensor that is not zero and has no place among theirs."""

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
            raise CheckpointError(f"{', '.join(sources)} belong into one tensor, but have different dtypes.")
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
