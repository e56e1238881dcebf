"""Data parallelism, as torch's FSDP2 lays it out: DDP, ZeRO 1 to 3 and HSDP are one mesh and two switches.

The mesh is (replicas, pieces of a copy). Weights, optimizer state and gradients are cut along their first dimension
(Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"); with pieces of 1 every rank has all of it, and what
is left is the all-reduce of gradients that DDP is (Li et al. 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL
from sheepop.model import Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import EXPERT_PIECE, EXPERT_REPLICA, PIECE, REPLICA


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    config: ParallelConfig,
    dtype: torch.dtype | None,
    experts: DeviceMesh | None = None,
) -> FSDPModule:
    """Lays `model` out over the data ranks of `mesh`, in place.

    The parameters of a block are one group, and those outside of blocks another; experts that are laid out otherwise
    have the mesh `experts`.

    With `dtype` blocks compute in it, from float32 weights, and gradients are added up in float32. Embedding, output
    head and what is exact stay float32. Gradients are summed over the ranks.
    """
    mesh = mesh[REPLICA, PIECE]
    computes = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    frees = config.zero == 3
    for mixture in model.mixtures.values():
        fully_shard(mixture.router, mesh=mesh, reshard_after_forward=frees, mp_policy=_EXACT)
        if experts is not None:
            fully_shard(
                mixture.experts,
                mesh=experts[EXPERT_REPLICA, EXPERT_PIECE],
                reshard_after_forward=frees,
                mp_policy=computes,
                shard_placement_fn=partial(_cut_of_experts, pieces=experts[EXPERT_PIECE].size()),
            )
    values = getattr(model, VALUE_MODEL, None)
    for block in (*model.layers, *(() if values is None else values.layers)):
        fully_shard(block, mesh=mesh, reshard_after_forward=frees, mp_policy=computes)
    # What is computed behind the forward pass finds its weights whole, as all of the outermost group.
    apart = {model.embedding, model.lm_head, model.blocks, model.ngrams}
    apart |= {getattr(model, name, None) for name in (REWARD_HEAD, VALUE_HEAD, VALUE_MODEL)}
    for child in model.children():
        if child not in apart and any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, reshard_after_forward=frees, mp_policy=computes)
    root: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=_EXACT)
    register_fsdp_forward_method(model, "run")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root


def _cut_of_experts(parameter: nn.Parameter, pieces: int) -> Shard:
    """Whole experts for each piece, or else a part of every one."""
    count, width = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[:2]
    return Shard(1 if count % pieces and width % pieces == 0 else 0)


# Gathering over one dimension of a mesh after the other is what is asked for; it changes no bit.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
_EXACT = MixedPrecisionPolicy(cast_forward_inputs=False)


@dataclass(frozen=True)
class Pieces:
    """This rank's pieces of the parameters of a model, and how whole tensors are made of pieces and cut into them.

    A tensor is named after its parameter, or ``parameter/slot``. It is cut as the parameter is, along the `dimensions`
    that a slot of this name has of it, which are all where none are given. What has another shape is whole already,
    such as a count of steps. Parameters that are `absent`, with the shape of the whole, belong to other ranks of a
    `pipeline`, and are empty here.
    """

    parameters: Mapping[str, DTensor]
    absent: Mapping[str, torch.Size] = field(default_factory=dict)
    pipeline: dist.ProcessGroup | None = None
    dimensions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        names: Mapping[Tensor, str],
        spread: Iterable[tuple[Tensor, DTensor]],
        pipeline: dist.ProcessGroup | None = None,
    ) -> Pieces:
        """Those of parameters with `names`; where a weight has two places here, the first one's."""
        found: dict[str, DTensor] = {}
        for parameter, piece in spread:
            found.setdefault(names[parameter], piece)
        absent = {name: parameter.shape for parameter, name in names.items() if name not in found}
        return cls(found, absent, pipeline)

    def shape(self, parameter: str) -> torch.Size:
        """That of a whole parameter, here or not."""
        return self.absent[parameter] if parameter in self.absent else self.parameters[parameter].shape

    def cuts(self, parameter: str) -> dict[int, list[dist.ProcessGroup]]:
        """By each dimension that a parameter is cut along: the ranks with the other pieces, as the mesh has them."""
        spread, found = self.parameters[parameter], dict[int, list[dist.ProcessGroup]]()
        for number, how in enumerate(spread.placements):
            if not isinstance(how, Replicate) and spread.device_mesh.size(number) > 1:
                found.setdefault(how.dim, []).append(spread.device_mesh.get_group(number))  # type: ignore[attr-defined]
        return found

    def is_here(self, name: str) -> bool:
        """Whether a tensor is one of this rank's, or of no parameter."""
        return _parameter_of(name) not in self.absent

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """The tensor that ranks have a piece of. All that do must ask for the same ones in the same order."""
        parameter, shape = self.parameters.get(_parameter_of(name)), self._shape(name, piece)
        if parameter is None or shape is None:
            return piece.detach()
        dimensions = self._dimensions(name, parameter)
        spread = DTensor.from_local(
            piece.detach(),
            parameter.device_mesh,
            [_along(how, dimensions) for how in parameter.placements],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return spread.full_tensor()

    def wholes(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, those of all ranks of a pipeline, on all of them in the same order."""
        here = {name: tensor for name, tensor in tensors.items() if self.is_here(name)}
        if self.pipeline is None:
            yield from ((name, self.whole(name, tensor)) for name, tensor in here.items())
            return
        forms = {name: (self._shape(name, tensor) or tensor.shape, tensor.dtype) for name, tensor in here.items()}
        device, rank, done = next(iter(self.parameters.values())).device, dist.get_rank(self.pipeline), set()
        for owner, told in enumerate(self.told(forms)):
            for name, (shape, dtype) in told.items():
                if name in done:
                    continue  # of the first and the last stage, or what all have
                done.add(name)
                is_here = owner == rank
                whole = self.whole(name, here[name]) if is_here else torch.empty(shape, dtype=dtype, device=device)
                whole = whole.contiguous()
                dist.broadcast(whole, group_src=owner, group=self.pipeline)
                yield name, whole

    def told(self, value: Any) -> list[Any]:
        """What each rank of the pipeline gives, as it would be pickled."""
        if self.pipeline is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.pipeline)
        dist.all_gather_object(found, value, group=self.pipeline)
        return found

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of `whole`."""
        if whole.ndim and not self.is_here(name):
            return whole.new_empty(0)
        parameter = self.parameters.get(_parameter_of(name))
        if parameter is None:
            return whole
        dimensions = self._dimensions(name, parameter)
        if whole.shape != _some(parameter.shape, dimensions):
            return whole
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        places = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
        return whole[tuple(places[dimension] for dimension in dimensions)].contiguous()

    def place(self, name: str) -> dict[str, int]:
        """Which piece of a parameter is here, by the dimensions of ranks that it is cut over."""
        return {dimension: number for dimension, number, is_cut in self._coordinates(name) if is_cut}

    def is_counted(self, name: str) -> bool:
        """Whether this rank's piece is the one that counts, of those that replicas have."""
        return all(is_cut or number == 0 for _, number, is_cut in self._coordinates(name))

    def laid_over(self, name: str) -> Sequence[str]:
        """The dimensions of ranks that a parameter is laid out over."""
        return [dimension for dimension, _, _ in self._coordinates(name)]

    def _coordinates(self, name: str) -> list[tuple[str, int, bool]]:
        """This rank's dimensions and numbers in them, and whether a parameter is cut over each."""
        spread = self.parameters[name]
        names, numbers = spread.device_mesh.mesh_dim_names or (), spread.device_mesh.get_coordinate() or ()
        return [
            (dimension, number, not isinstance(how, Replicate))
            for dimension, number, how in zip(names, numbers, spread.placements, strict=True)
        ]

    def _shape(self, name: str, piece: Tensor) -> torch.Size | None:
        """The shape of the whole that `piece` is cut from, None where it is whole."""
        parameter = self.parameters.get(_parameter_of(name))
        if parameter is None:
            return None
        dimensions = self._dimensions(name, parameter)
        is_cut = piece.ndim > 0 and piece.shape == _some(parameter.to_local().shape, dimensions)
        return _some(parameter.shape, dimensions) if is_cut else None

    def _dimensions(self, name: str, parameter: DTensor) -> tuple[int, ...]:
        """Those of a parameter that a tensor has."""
        return self.dimensions.get(name.partition("/")[2], tuple(range(parameter.ndim)))


def _parameter_of(name: str) -> str:
    return name.partition("/")[0]


def _some(shape: torch.Size, dimensions: Iterable[int]) -> torch.Size:
    return torch.Size(shape[dimension] for dimension in dimensions)


def _along(how: Placement, dimensions: tuple[int, ...]) -> Placement:
    """How a tensor is cut that has only these dimensions of a parameter."""
    dimension = getattr(how, "dim", None)
    if dimension not in dimensions:
        return Replicate()
    place = dimensions.index(dimension)
    return how if place == dimension else Shard(place)


def same_on_all(parameters: Iterable[Tensor]) -> None:
    """Gives every rank the values of the first, in place."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)
