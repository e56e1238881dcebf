"""Layers that compute with a part of their parameters: what a rank of several that share a layer has of it.

A layer gets a class that computes with the rank's part; nothing else of the network knows of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call


@dataclass(frozen=True)
class SharingRanks:
    """The ranks that share layers, this one number `rank` of `size`.

    With a `mesh`, to train, parts are DTensors over it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharingRanks:
        """Those of a mesh with one dimension, for training."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)

    def part(self, parameter: Tensor, dimension: int) -> Tensor:
        """What this rank has of a parameter that is split along `dimension`."""
        part = parameter.detach().chunk(self.size, dimension)[self.rank].contiguous()
        return part if self.mesh is None else DTensor.from_local(part, self.mesh, [Shard(dimension)], run_check=False)

    def __deepcopy__(self, memory: dict[int, Any]) -> SharingRanks:
        return self  # processes are no part of a model, whose layers know them


def give_part(layer: nn.Module, kind: type[nn.Module], ranks: SharingRanks, dimensions: Mapping[str, int]) -> None:
    """Makes `layer` one of `kind`, with its part of the parameters that are split along these dimensions."""
    for name, dimension in dimensions.items():
        parameter = getattr(layer, name)
        if parameter is not None:
            part = ranks.part(parameter, dimension)
            setattr(layer, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.ranks = ranks  # type: ignore[assignment]
    layer.__class__ = _class_of(kind, type(layer))  # type: ignore[arg-type]


@functools.cache  # compiled code tells classes apart
def _class_of(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__.strip('_')}{base.__name__}", (kind, base), {})


class LayerPart(nn.Module):
    """A layer that computes with this rank's part of its parameters."""

    ranks: SharingRanks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the layer computes by itself, with the parameters that are here."""
        return functional_call(_Plain(self), self.parts(), inputs, named)

    def parts(self) -> dict[str, Tensor]:
        """The parameters of its own, as they are here."""
        return {f"layer.{name}": here(parameter) for name, parameter in self.named_parameters(recurse=False)}


class _Plain(nn.Module):
    """The layer as it is by itself."""

    def __init__(self, layer: LayerPart) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super(LayerPart, self.layer).forward(*inputs, **named)


def here(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
