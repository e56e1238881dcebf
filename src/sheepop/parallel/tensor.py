"""Tensor parallelism: the matrices of a block are split over ranks, which compute with parts of heads and of features.

A sublayer reads the same x on every rank. Its first matrices are split by rows, so that each rank has heads or features
of its own; its last one is split by columns, and the sum over ranks is the result (Shoeybi et al. 2019, "Megatron-LM",
section 3). That is one all-reduce a sublayer forwards, and one backwards. Embedding, norms and output head are the same
everywhere. A layer gets a class that computes with the rank's part; nothing else of the network knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raises `ConfigError` for a network that cannot be split over so many ranks."""
    if ranks == 1:
        return
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.ffn_size}
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"parallel.tensor = {ranks} does not divide model.{name} = {size}, which every rank has its share of. "
                "Use a divisor, or another size."
            )
    refused = {
        "model.experts": config.experts is not None,
        "model.qk_norm = width, whose mean is over all heads,": config.qk_norm == "width",
        "model.dropout, which is drawn for whole layers,": config.dropout > 0,
        "model.architecture = encoder_decoder": config.architecture != "decoder",
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"parallel.tensor = {ranks} does not go with {name} yet. Use parallel.tensor=1.")


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """Gives the layers of `model` this rank's parts, in place, as DTensors over `mesh`, which has one dimension."""
    group = mesh.get_group()
    for block in model.layers:
        _split_attention(block.attention, mesh)
        _split_feed_forward(block.feed_forward, mesh)
        for sublayer in (block.attention, block.feed_forward):
            sublayer.register_forward_pre_hook(_Entering(group))
    if model.slopes is not None:
        model.slopes = model.slopes.chunk(mesh.size())[mesh.get_local_rank()]


def _split_attention(attention: Attention, mesh: DeviceMesh) -> None:
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        _give(layer, _Rows, mesh, {"weight": 0, "bias": 0})
    _give(attention.o_proj, _Columns, mesh, {"weight": 1})
    if attention.convolutions is not None:
        for convolution in attention.convolutions.values():
            _give(convolution, _Local, mesh, {"taps": 1})
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            _give(norm, _OfAllHeads, mesh, {})
    if attention.sinks is not None:
        _give(attention, _Local, mesh, {"sinks": 0})


def _split_feed_forward(feed_forward: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(feed_forward, FeedForward)
    for layer in (feed_forward.gate_proj, feed_forward.up_proj):
        if layer is not None:
            _give(layer, _Rows, mesh, {"weight": 0, "bias": 0})
    _give(feed_forward.down_proj, _Columns, mesh, {"weight": 1})


def _give(layer: nn.Module, kind: type[_Local], mesh: DeviceMesh, dimensions: Mapping[str, int]) -> None:
    """Makes `layer` one of `kind`, with its part of the parameters that are split along these dimensions."""
    for name, dimension in dimensions.items():
        parameter = getattr(layer, name)
        if parameter is not None:
            part = parameter.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous()
            spread = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
            setattr(layer, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    layer.group = mesh.get_group()  # type: ignore[assignment]
    layer.__class__ = type(f"{kind.__name__.strip('_')}{type(layer).__name__}", (kind, type(layer)), {})


class _Local(nn.Module):
    """A layer that computes with this rank's part of its parameters."""

    group: dist.ProcessGroup

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
        found: Tensor = _Summed.apply(nn.functional.linear(x, _here(self.weight)), self.group)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + _here(self.bias)


class _OfAllHeads(_Local):
    """A norm that every rank applies to its heads: its gradient is the sum over all of them."""

    def parts(self) -> dict[str, Tensor]:
        return {name: _Entered.apply(part, self.group) for name, part in super().parts().items()}  # type: ignore[no-untyped-call]


class _Entering:
    """Lets the first argument of a layer into what ranks compute apart."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Entered.apply(inputs[0], self._group), *inputs[1:])  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memory: dict[int, Any]) -> _Entering:
        return self  # a process group is no part of a model


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
