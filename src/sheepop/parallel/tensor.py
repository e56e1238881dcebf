"""Tensor parallelism: the matrices of a block are split over ranks, which compute with parts of heads and of features.

A sublayer reads the same x on every rank. Its first matrices are split by rows, so that each rank has heads or features
of its own; its last one is split by columns, and the sum over ranks is the result (Shoeybi et al. 2019, "Megatron-LM",
section 3). That is one all-reduce a sublayer forwards, and one backwards. Embedding, norms and output head are the same
everywhere. A layer gets a class that computes with the rank's part; nothing else of the network knows of it.
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

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.attention.layer import Attention
from sheepop.model.feedforward import FeedForward


def check_split(config: ModelConfig, count: int) -> None:
    """Raises `ConfigError` for a network whose matrices cannot be split over `count` ranks."""
    if count == 1:
        return
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.ffn_size}
    for name, size in sizes.items():
        if size % count:
            raise ConfigError(
                f"Matrices cannot be split over {count} ranks, because {count} does not divide model.{name} = {size}. "
                "Use a divisor."
            )
    refused = {
        "experts": config.experts is not None,
        "model.qk_norm = width, which is over all heads": config.qk_norm == "width",
        "an encoder": config.architecture != "decoder",
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"Matrices are split over ranks for a decoder, and not for one with {name}.")


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that split tensors, this one number `rank` of `size`; with a `mesh` parts are DTensors over it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorRanks:
        """Those of a mesh with one dimension, for training."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)

    def part(self, parameter: Tensor, dimension: int) -> Tensor:
        """What this rank has of a parameter that is split along `dimension`."""
        part = parameter.detach().chunk(self.size, dimension)[self.rank].contiguous()
        return part if self.mesh is None else DTensor.from_local(part, self.mesh, [Shard(dimension)], run_check=False)

    def __deepcopy__(self, memory: dict[int, Any]) -> TensorRanks:
        return self  # processes are no part of a model, whose layers know them


def split(model: Transformer, ranks: TensorRanks) -> None:
    """Gives the layers of `model` this rank's parts, in place."""
    for block in model.layers:
        _split_attention(block.attention, ranks)
        _split_feed_forward(block.feed_forward, ranks)
        for sublayer in (block.attention, block.feed_forward):
            sublayer.register_forward_pre_hook(_Entering(ranks))
    if model.slopes is not None:
        model.slopes = model.slopes.chunk(ranks.size)[ranks.rank]


def split_to_write(model: Transformer, ranks: TensorRanks) -> None:
    """As `split`, for a model that is only read from then on: it is one with fewer heads, as caches see it."""
    config = model.config
    check_split(config, ranks.size)
    if not all(type(layer) is nn.Linear for layer in model.blocks.modules() if isinstance(layer, nn.Linear)):
        raise ConfigError(
            "Weights that are quantised are not split over ranks. Use the model that they were rounded from."
        )
    split(model, ranks)
    model.config = config.replace(
        num_heads=config.num_heads // ranks.size,
        num_kv_heads=config.kv_heads // ranks.size,
        head_dim=config.head_size,
        value_head_dim=config.value_size,
        d_ff=config.ffn_size // ranks.size,
    )


def _split_attention(attention: Attention, ranks: TensorRanks) -> None:
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        _give(layer, _Rows, ranks, {"weight": 0, "bias": 0})
    _give(attention.o_proj, _Columns, ranks, {"weight": 1})
    if attention.convolutions is not None:
        for convolution in attention.convolutions.values():
            _give(convolution, _Local, ranks, {"taps": 1})
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            _give(norm, _OfAllHeads, ranks, {})
    if attention.sinks is not None:
        _give(attention, _Local, ranks, {"sinks": 0})


def _split_feed_forward(feed_forward: nn.Module, ranks: TensorRanks) -> None:
    assert isinstance(feed_forward, FeedForward)
    for layer in (feed_forward.gate_proj, feed_forward.up_proj):
        if layer is not None:
            _give(layer, _Rows, ranks, {"weight": 0, "bias": 0})
    _give(feed_forward.down_proj, _Columns, ranks, {"weight": 1})


def _give(layer: nn.Module, kind: type[_Local], ranks: TensorRanks, dimensions: Mapping[str, int]) -> None:
    """Makes `layer` one of `kind`, with its part of the parameters that are split along these dimensions."""
    for name, dimension in dimensions.items():
        parameter = getattr(layer, name)
        if parameter is not None:
            part = ranks.part(parameter, dimension)
            setattr(layer, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.ranks = ranks  # type: ignore[assignment]
    layer.__class__ = _class_of(kind, type(layer))  # type: ignore[arg-type]


@functools.cache  # compiled code tells classes apart
def _class_of(kind: type[_Local], base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__.strip('_')}{base.__name__}", (kind, base), {})


class _Local(nn.Module):
    """A layer that computes with this rank's part of its parameters."""

    ranks: TensorRanks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return functional_call(_Plain(self), self.parts(), inputs, named)

    def parts(self) -> dict[str, Tensor]:
        """The parameters of its own, as they are here."""
        return {f"layer.{name}": _here(parameter) for name, parameter in self.named_parameters(recurse=False)}


class _Plain(nn.Module):
    """The layer as it is by itself."""

    def __init__(self, layer: _Local) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super(_Local, self.layer).forward(*inputs, **named)


class _Rows(_Local):
    """A linear layer with some of its outputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, _here(self.weight), None if self.bias is None else _here(self.bias))


class _Columns(_Local):
    """A linear layer with some of its inputs: the sum over ranks, and then the bias."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Summed.apply(nn.functional.linear(x, _here(self.weight)), self.ranks.group)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + _here(self.bias)


class _OfAllHeads(_Local):
    """A norm that every rank applies to its heads: its gradient is the sum over all of them."""

    def parts(self) -> dict[str, Tensor]:
        return {name: _Entered.apply(part, self.ranks.group) for name, part in super().parts().items()}  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Entering:
    """Lets the first argument of a layer into what ranks compute apart."""

    ranks: TensorRanks

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Entered.apply(inputs[0], self.ranks.group), *inputs[1:])  # type: ignore[no-untyped-call]


class _Entered(torch.autograd.Function):
    """The same on every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """The sum over ranks; each of them has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        found = x.contiguous().clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _here(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
