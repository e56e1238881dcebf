"""Data parallelism on torch's FSDP2: DDP, ZeRO 1 to 3 and HSDP are one mesh and two switches.

The mesh is (replicas, pieces of a copy). Weights, optimizer state and gradients are cut along their first dimension
(Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). With one piece every rank has everything, and the
all-reduce of gradients is DDP (Li et al. 2020).
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

from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.model import Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import EXPERT_PIECE, EXPERT_REPLICA, PIECE, REPLICA
from sheepop.parallel.parts import part_of

# Torch warns that it gathers over one mesh dimension after the other, which is intended and changes no bit.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
_EXACT = MixedPrecisionPolicy(cast_forward_inputs=False)


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    config: ParallelConfig,
    dtype: torch.dtype | None,
    experts: DeviceMesh | None = None,
) -> FSDPModule:
    """Shards `model` over the data ranks of `mesh`, in place; experts use the mesh `experts` if one is given.

    The parameters of each block are one group, and those outside blocks another. With `dtype`, blocks compute in it
    from float32 weights, and gradients are reduced in float32; embedding, output head and layers that must be exact
    stay float32. Gradients are summed over ranks, not averaged. Quantised weights, which are never trained, stay
    as they are on every rank.
    """
    mesh = mesh[REPLICA, PIECE]
    whole: set[nn.Parameter] = {weight for weight in model.parameters() if isinstance(weight, StoredWeight)}
    computes = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.zero == 3,
        "mp_policy": computes,
        "ignored_params": whole,
    }
    for mixture in model.mixtures.values():
        fully_shard(mixture.router, **{**how, "mp_policy": _EXACT})
        if experts is not None:
            cut = partial(_cut_of_experts, pieces=experts[EXPERT_PIECE].size())
            fully_shard(
                mixture.experts, **{**how, "mesh": experts[EXPERT_REPLICA, EXPERT_PIECE]}, shard_placement_fn=cut
            )
    values = getattr(model, VALUE_MODEL, None)
    for block in (*model.layers, *(() if values is None else values.layers)):
        fully_shard(block, **how)
    # These are used after the forward pass, so they stay in the outermost group, which is whole until backward.
    outermost = {model.embedding, model.lm_head, model.blocks, model.ngrams}
    outermost |= {getattr(model, name, None) for name in (REWARD_HEAD, VALUE_HEAD, VALUE_MODEL)}
    for child in model.children():
        if child not in outermost and any(True for _ in child.parameters()):
            fully_shard(child, **how)
    root: FSDPModule = fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=_EXACT, ignored_params=whole
    )
    register_fsdp_forward_method(model, "run")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root


def _cut_of_experts(parameter: nn.Parameter, pieces: int) -> Shard:
    """Cuts the width of every expert if `pieces` divides it but not the number of experts, else between experts."""
    count, width = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[:2]
    return Shard(1 if count % pieces and width % pieces == 0 else 0)


@dataclass(frozen=True)
class Pieces:
    """This rank's pieces of a model's parameters; makes whole tensors of pieces, and pieces of whole tensors.

    A tensor is named after its parameter, or ``parameter/slot`` for the state of an optimizer. It is cut as the
    parameter is, along those of the parameter's dimensions that `dimensions` lists for the slot (all if it lists none).
    A tensor of another shape, such as a count of steps, is always whole. `absent` parameters, with their whole shapes,
    belong to other ranks of the `pipeline`.
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
        """Returns the pieces of the parameters with `names`; of a weight that is here twice, the first piece."""
        found: dict[str, DTensor] = {}
        for parameter, piece in spread:
            found.setdefault(names[parameter], piece)
        absent = {name: parameter.shape for parameter, name in names.items() if name not in found}
        return cls(found, absent, pipeline)

    def shape(self, parameter: str) -> torch.Size:
        """Returns the shape of a whole parameter, here or not."""
        return self.absent[parameter] if parameter in self.absent else self.parameters[parameter].shape

    def cuts(self, parameter: str) -> dict[int, list[dist.ProcessGroup]]:
        """Returns for each dimension that a parameter is cut along the groups of ranks with the other pieces.

        If there are several, the ranks of the last group cut first, and those of the one before it cut a part of them.
        """
        spread, found = self.parameters[parameter], dict[int, list[dist.ProcessGroup]]()
        for number, how in enumerate(spread.placements):
            if not isinstance(how, Replicate) and spread.device_mesh.size(number) > 1:
                found.setdefault(how.dim, []).append(spread.device_mesh.get_group(number))  # type: ignore[attr-defined]
        return found

    def is_here(self, name: str) -> bool:
        """Whether a tensor belongs to a parameter of this rank, or to none."""
        return _parameter_of(name) not in self.absent

    @torch.no_grad()
    def whole(self, name: str, piece: Tensor) -> Tensor:
        """Gathers a tensor from its pieces; all ranks that have one must gather the same tensors in the same order."""
        parameter, shape = self.parameters.get(_parameter_of(name)), self._shape(name, piece)
        if parameter is None or shape is None:
            return piece.detach()
        found = piece.detach()
        for dimension, groups in self._cuts(name, parameter):
            wider = _spans(shape[dimension], groups)[-2::-1]
            for group, span in zip(groups, wider, strict=True):
                found = _joined(found, dimension, len(span), group)
        return found

    def wholes(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields names and whole tensors of all ranks of a pipeline, on all of them in the same order."""
        here = {name: tensor for name, tensor in tensors.items() if self.is_here(name)}
        if self.pipeline is None:
            yield from ((name, self.whole(name, tensor)) for name, tensor in here.items())
            return
        forms = {name: (self._shape(name, tensor) or tensor.shape, tensor.dtype) for name, tensor in here.items()}
        device, rank, done = next(iter(self.parameters.values())).device, dist.get_rank(self.pipeline), set()
        for owner, owned in enumerate(self.told(forms)):
            for name, (shape, dtype) in owned.items():
                if name in done:
                    continue  # shared by the first and the last stage, or by all
                done.add(name)
                is_here = owner == rank
                whole = self.whole(name, here[name]) if is_here else torch.empty(shape, dtype=dtype, device=device)
                whole = whole.contiguous()
                dist.broadcast(whole, group_src=owner, group=self.pipeline)
                yield name, whole

    def told(self, value: Any) -> list[Any]:
        """Returns the `value`, which is pickled, of each rank of the pipeline."""
        if self.pipeline is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.pipeline)
        dist.all_gather_object(found, value, group=self.pipeline)
        return found

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's piece of `whole`, empty if its parameter is on another rank of the pipeline."""
        if whole.ndim and not self.is_here(name):
            return whole.new_empty(0)
        parameter = self.parameters.get(_parameter_of(name))
        if parameter is None:
            return whole
        dimensions = self._dimensions(name, parameter)
        if whole.shape != _some(parameter.shape, dimensions):
            return whole
        found = whole
        for dimension, groups in self._cuts(name, parameter):
            span = _spans(whole.shape[dimension], groups)[-1]
            found = found.narrow(dimension, span.start, len(span))
        return found.contiguous()

    def place(self, name: str) -> dict[str, int]:
        """Returns the number of this rank's piece of a parameter, for each mesh dimension that it is cut over."""
        return {dimension: number for dimension, number, is_cut in self._coordinates(name) if is_cut}

    def is_counted(self, name: str) -> bool:
        """Whether this rank's piece counts in sums; of the replicas of a piece the first one does."""
        return all(is_cut or number == 0 for _, number, is_cut in self._coordinates(name))

    def laid_over(self, name: str) -> Sequence[str]:
        """Returns the mesh dimensions that a parameter is laid out over."""
        return [dimension for dimension, _, _ in self._coordinates(name)]

    def _coordinates(self, name: str) -> list[tuple[str, int, bool]]:
        """Returns each mesh dimension, this rank's number in it, and whether the parameter is cut over it."""
        spread = self.parameters[name]
        names, numbers = spread.device_mesh.mesh_dim_names or (), spread.device_mesh.get_coordinate() or ()
        return [
            (dimension, number, not isinstance(how, Replicate))
            for dimension, number, how in zip(names, numbers, spread.placements, strict=True)
        ]

    def _shape(self, name: str, piece: Tensor) -> torch.Size | None:
        """Returns the shape of the tensor that `piece` is cut from, None if it is whole."""
        parameter = self.parameters.get(_parameter_of(name))
        if parameter is None:
            return None
        dimensions = self._dimensions(name, parameter)
        is_cut = piece.ndim > 0 and piece.shape == _some(parameter.to_local().shape, dimensions)
        return _some(parameter.shape, dimensions) if is_cut else None

    def _cuts(self, name: str, parameter: DTensor) -> list[tuple[int, list[dist.ProcessGroup]]]:
        """Returns `cuts` of the parameter along the dimensions that the tensor `name` has, by their place in that."""
        dimensions, cuts = self._dimensions(name, parameter), self.cuts(_parameter_of(name))
        return [(dimensions.index(dimension), groups) for dimension, groups in cuts.items() if dimension in dimensions]

    def _dimensions(self, name: str, parameter: DTensor) -> tuple[int, ...]:
        return self.dimensions.get(name.partition("/")[2], tuple(range(parameter.ndim)))


def _parameter_of(name: str) -> str:
    return name.partition("/")[0]


def _spans(size: int, groups: Sequence[dist.ProcessGroup]) -> list[range]:
    """Returns the places along a dimension that are on this rank before the first of its cuts and after each."""
    found = [range(size)]
    for group in reversed(groups):
        found.append(part_of(found[-1], dist.get_rank(group), group.size()))
    return found


def _joined(piece: Tensor, dimension: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Joins pieces that were cut as by ``torch.chunk``, without DTensor's work in Python for each tensor."""
    piece = piece.movedim(dimension, 0)
    each = -(-size // group.size())
    filled = torch.cat([piece, piece.new_empty(each - len(piece), *piece.shape[1:])])  # the last pieces may be shorter
    found = filled.new_empty(each * group.size(), *filled.shape[1:])
    dist.all_gather(list(found.chunk(group.size())), filled, group=group)
    return found[:size].movedim(0, dimension).contiguous()


def _some(shape: torch.Size, dimensions: Iterable[int]) -> torch.Size:
    return torch.Size(shape[dimension] for dimension in dimensions)


def same_on_all(parameters: Iterable[Tensor]) -> None:
    """Copies the first rank's values to all ranks, in place."""
    for parameter in parameters:
        for tensor in parameter.memory if isinstance(parameter, StoredWeight) else [parameter.detach()]:
            dist.broadcast(tensor, 0)
