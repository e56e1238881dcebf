"""Computes queries, keys and values by one matrix product, with their weights packed in one block of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PackedProjections:
    """Weights (E, D) and biases (E,) of several layers in one block of memory; `parts` are the layers' parameters."""

    weight: Tensor
    bias: Tensor | None
    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> PackedProjections | None:
        """Packs the parameters of plain linear layers; returns None if one of the layers is not plain."""
        weights, biases = _parameters(layers)
        parts = (*weights, *biases)
        alike = {(type(part), part.dtype, part.device) for part in parts}
        if len(weights) < len(layers) or len(biases) not in (0, len(layers)):
            return None
        if len(alike) > 1 or type(parts[0]) is not nn.Parameter:
            return None
        return cls(_together(weights), _together(biases) if biases else None, parts)

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these layers still use the packed weights, and have no hooks and no autocast."""
        if torch.is_autocast_enabled(self.weight.device.type):
            return False  # autocast caches the cast copies of parameters only
        weights, biases = _parameters(layers)
        parts = (*weights, *biases)
        if any(map(_has_hooks, layers)) or len(parts) != len(self.parts) or not all(map(is_, parts, self.parts)):
            return False
        # Compiled code cannot compare addresses; code that swaps parameter memory must copy the module or `_apply` it.
        return torch.compiler.is_compiling() or self._lies_together()

    def product(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Returns the output of each layer for x (B, T, E_i)."""
        return _Product.apply(x_BTD, self.weight, self.bias, *self.parts)  # type: ignore[no-untyped-call]

    def _lies_together(self) -> bool:
        weights = self.parts if self.bias is None else self.parts[: len(self.parts) // 2]
        return _follow(self.weight, weights) and (self.bias is None or _follow(self.bias, self.parts[len(weights) :]))


def _parameters(layers: Sequence[nn.Module]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the weights and biases of the layers that are exactly `nn.Linear`."""
    plain = [layer for layer in layers if isinstance(layer, nn.Linear) and type(layer) is nn.Linear]
    weights = [layer.weight for layer in plain]
    return weights, [layer.bias for layer in plain if layer.bias is not None]


def _together(parts: Sequence[Tensor]) -> Tensor:
    first, length = parts[0].detach(), sum(map(len, parts))
    if len({part.untyped_storage()._cdata for part in parts}) == 1 and _follow(first, parts):
        # They are already packed. Keep the memory, since another copy of the network may compute with it.
        return first.as_strided((length, *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def _follow(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    address = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != address:
            return False
        address += part.nbytes
    return True


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


class _Product(torch.autograd.Function):
    """``x W^T + b`` split into parts; the backward pass has one product for x and one for W.

    The gradients go to the parts of W and b.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight: Tensor, bias: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BTD, weight)
        ctx.sizes = [len(part) for part in parts if part.ndim == 2]
        ctx.has_bias = bias is not None
        return torch.split(F.linear(x_BTD, weight, bias), ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight = ctx.saved_tensors
        gradient = torch.cat(gradients, dim=-1).flatten(0, -2)
        for_x = (gradient @ weight).view_as(x_BTD) if ctx.needs_input_grad[0] else None
        for_parts: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        if any(ctx.needs_input_grad[3:]):
            for_parts[: len(ctx.sizes)] = torch.split(gradient.t() @ x_BTD.flatten(0, -2), ctx.sizes)
            if ctx.has_bias:
                for_parts[len(ctx.sizes) :] = torch.split(gradient.sum(0), ctx.sizes)
        return (for_x, None, None, *for_parts)
