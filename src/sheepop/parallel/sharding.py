"""Data parallelism, as torch's FSDP2 lays it out: DDP, ZeRO 1 to 3 and HSDP are one mesh and two switches.

The mesh is (replicas, pieces of a copy). Weights, optimizer state and gradients are cut along their first dimension
(Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"); with pieces of 1 every rank has all of it, and what
is left is the all-reduce of gradients that DDP is (Li et al. 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.model import Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import PIECE, REPLICA


def shard(model: Transformer, mesh: DeviceMesh, config: ParallelConfig, dtype: torch.dtype | None) -> FSDPModule:
    """Lays `model` out over the data ranks of `mesh`, in place.

    The parameters of a block are one group, and those outside of blocks another.

    With `dtype` blocks compute in it, from float32 weights, and gradients are added up in float32. Embedding, output
    head and what is exact stay float32. Gradients are summed over the ranks.
    """
    mesh = mesh[REPLICA, PIECE]
    computes = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    frees = config.zero == 3
    for mixture in model.mixtures.values():
        fully_shard(mixture.router, mesh=mesh, reshard_after_forward=frees, mp_policy=_EXACT)
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=frees, mp_policy=computes)
    # What is computed behind the forward pass finds its weights whole, as all of the outermost group.
    apart = {model.embedding, model.lm_head, model.blocks, model.ngrams, getattr(model, REWARD_HEAD, None)}
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


# Gathering over one dimension of a mesh after the other is what is asked for; it changes no bit.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
_EXACT = MixedPrecisionPolicy(cast_forward_inputs=False)


@dataclass(frozen=True)
class Pieces:
    """This rank's pieces of the parameters of a model, and how whole tensors are made of pieces and cut into them.

    A tensor is named after its parameter, or ``parameter/slot``. It is cut as the parameter is where it has its shape,
    or a number for each of its rows; any other is whole already, such as a count of steps.
    """

    parameters: Mapping[str, DTensor]

    @classmethod
    def of(cls, model: nn.Module) -> Pieces:
        """Those of a model that was laid out by `shard`."""
        found = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
        return cls(found)

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """The tensor that all ranks have a piece of. All ranks must ask for the same ones in the same order."""
        parameter = self._parameter(name)
        if parameter is None or not _is_like(piece, parameter.to_local()):
            return piece.detach()
        shape = parameter.shape[: piece.ndim]
        spread = DTensor.from_local(
            piece.detach(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return spread.full_tensor()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of `whole`."""
        parameter = self._parameter(name)
        if parameter is None or not _is_like(whole, parameter):
            return whole
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        places = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
        return whole[tuple(places[: whole.ndim])].contiguous()

    def place(self, name: str) -> dict[str, int]:
        """Which piece of a parameter is here, by the dimensions of ranks that it is cut over."""
        return {dimension: number for dimension, number, is_cut in self._coordinates(name) if is_cut}

    def is_counted(self, name: str) -> bool:
        """Whether this rank's piece is the one that counts, of those that replicas have."""
        return all(is_cut or number == 0 for _, number, is_cut in self._coordinates(name))

    def _coordinates(self, name: str) -> list[tuple[str, int, bool]]:
        """This rank's dimensions and numbers in them, and whether a parameter is cut over each."""
        spread = self.parameters[name]
        names, numbers = spread.device_mesh.mesh_dim_names or (), spread.device_mesh.get_coordinate() or ()
        return [
            (dimension, number, not isinstance(how, Replicate))
            for dimension, number, how in zip(names, numbers, spread.placements, strict=True)
        ]

    def _parameter(self, name: str) -> DTensor | None:
        name = name if name in self.parameters else name.rpartition("/")[0]
        return self.parameters.get(name)


def _is_like(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.shape in (parameter.shape, parameter.shape[:1])


def same_on_all(parameters: Iterable[Tensor]) -> None:
    """Gives every rank the values of the first, in place."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)
