"""Float weights that the project's own kernels read, which is faster than PyTorch for a few rows on a CPU."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from sheepop.adapt.stored_weight import Format, StoredWeight, has_kernels
from sheepop.core.native import native_kernels_allowed
from sheepop.model import Transformer
from sheepop.model.experts import Experts, Router

_FORMATS: dict[torch.dtype, Format] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Matrices that fit a processor's cache leave little to gain, and compiling takes seconds.
_LEAST_BYTES = 16 * 2**20


def wants_native_kernels(model: Transformer) -> bool:
    """Whether kernels that have to be compiled first are worth it: for integers, and for large matrices, on a CPU."""
    if model.device.type != "cpu" or model.dtype not in _FORMATS:
        return False
    allowed = native_kernels_allowed()
    if allowed is not None:
        return allowed
    integers = any(isinstance(weight, StoredWeight) and weight.scales is not None for weight in model.parameters())
    return integers or sum(weight.nbytes for weight in _matrices(model)) >= _LEAST_BYTES


def with_native_products(model: Transformer, *, always: bool = False) -> Transformer:
    """A copy of the network over the same memory whose matrices are read by the kernels; not for training.

    Products of many rows go through PyTorch's kernels, which are faster there, unless `always` is said.
    """
    replaced = {}
    for weight in _matrices(model):
        stored, numbers, scales = _FORMATS[weight.dtype], weight.detach(), None
        if isinstance(weight, StoredWeight):
            stored, numbers, scales = weight.stored, weight.numbers, weight.scales
        made = StoredWeight(stored, numbers, scales, weight.dtype)
        made.always_native = always
        replaced[weight] = nn.Parameter(made, requires_grad=False)
    return model.sharing_copy(replaced)


def can_be_batch_invariant(model: Transformer) -> bool:
    """Whether the kernels may compute all products of this network."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or not has_kernels():
        return False
    return all(cast(StoredWeight, weight).kernel is not None for weight in _matrices(with_native_products(model)))


def _matrices(model: Transformer) -> list[nn.Parameter]:
    """The weights of linear layers, routers and experts, each once, whose numbers the kernels read."""
    found: dict[nn.Parameter, None] = {}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Router | Experts):
            dimensions = 3 if isinstance(layer, Experts) else 2
            found |= dict.fromkeys(weight for weight in layer.parameters(recurse=False) if weight.ndim == dimensions)
    return [weight for weight in found if weight.dtype in _FORMATS]
