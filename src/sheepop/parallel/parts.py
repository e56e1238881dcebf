"""Layers that compute with one rank's part of their parameters.

`give_part` changes the class of a layer to one that computes with the part; the rest of the network is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from sheepop.adapt.stored_weight import StoredWeight


def part_of(whole: range, number: int, count: int) -> range:
    """Returns part `number` of `count`, as ``torch.chunk`` cuts them: equal ones, of which the last may be shorter."""
    each = -(-len(whole) // count)
    return whole[number * each : (number + 1) * each]


@dataclass(frozen=True)
class SharingRanks:
    """A group of ranks that share layers or the tokens of a row; this process is number `rank` of `size`.

    With a `mesh`, which training needs, parts of parameters are DTensors over it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharingRanks:
        """The ranks of a mesh with one dimension, for training."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)

    def own(self, size: int) -> range:
        """Returns which of `size` rows are this rank's; the last rank may have fewer."""
        return part_of(range(size), self.rank, self.size)

    def part(self, parameter: Tensor, dimension: int) -> Tensor:
        """Returns this rank's part of a parameter split along `dimension`; a quantised one stays as it is stored."""
        if isinstance(parameter, StoredWeight):
            return parameter.part(self.rank, self.size, dimension)
        whole = parameter.detach().contiguous()
        part = whole.chunk(self.size, dimension)[self.rank]
        if self.mesh is None:  # a view would keep the memory of the whole
            return part.clone(memory_format=torch.contiguous_format)
        # Without the shape of the whole, DTensor would take all parts to have the size of this one.
        shape, stride = whole.shape, whole.stride()
        placed = [Shard(dimension)]
        return DTensor.from_local(part.contiguous(), self.mesh, placed, run_check=False, shape=shape, stride=stride)

    def columns(self, num_tokens: int) -> slice:
        """Returns which of a row's tokens are this rank's; raises `ValueError` if the ranks cannot have equal parts."""
        if num_tokens % self.size:
            raise ValueError(f"rows of {num_tokens} tokens cannot be shared evenly by {self.size} ranks")
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def __deepcopy__(self, memory: dict[int, Any]) -> SharingRanks:
        return self  # a process group cannot be copied, and copies of a layer use the same one


def give_part(layer: nn.Module, kind: type[nn.Module], ranks: SharingRanks, dimensions: Mapping[str, int]) -> None:
    """Adds the class `kind` to `layer` and cuts the named parameters to this rank's part along their dimensions."""
    for name, dimension in dimensions.items():
        parameter = getattr(layer, name)
        if parameter is not None:
            part = ranks.part(parameter, dimension)
            setattr(layer, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.ranks = ranks  # type: ignore[assignment]
    layer.__class__ = _class_of(kind, type(layer))  # type: ignore[arg-type]


@functools.cache  # torch.compile compiles again for each new class
def _class_of(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__.strip('_')}{base.__name__}", (kind, base), {})


class LayerPart(nn.Module):
    """A layer that computes with this rank's part of its parameters."""

    ranks: SharingRanks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the forward pass of the original class with `parts()` as parameters."""
        return functional_call(_Plain(self), self.parts(), inputs, named)

    def parts(self) -> dict[str, Tensor]:
        """Returns the layer's own parameters as local tensors, by their names in `_Plain`."""
        return {f"layer.{name}": here(parameter) for name, parameter in self.named_parameters(recurse=False)}


class _Plain(nn.Module):
    def __init__(self, layer: LayerPart) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super(LayerPart, self.layer).forward(*inputs, **named)


def here(parameter: Tensor) -> Tensor:
    """Returns the local tensor of a parameter that may be a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
