"""Products of float weights by the project's own kernels, faster than PyTorch for a few rows on a CPU."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from sheepop.adapt.stored_weight import Format, StoredWeight, has_kernels
from sheepop.core.native import native_kernels_allowed
from sheepop.model import Transformer
from sheepop.model.experts import Experts, Router

_FORMATS: dict[torch.dtype, Format] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Matrices that fit the processor's cache gain little, and compiling takes seconds.
_LEAST_BYTES = 16 * 2**20


def wants_native_kernels(model: Transformer) -> bool:
    """Whether native kernels are worth compiling: for integers or large matrices, on a CPU."""
    if model.device.type != "cpu" or model.dtype not in _FORMATS:
        return False
    allowed = native_kernels_allowed()
    if allowed is not None:
        return allowed
    integers = any(isinstance(weight, StoredWeight) and weight.scales is not None for weight in model.parameters())
    return integers or sum(weight.nbytes for weight in _matrices(model)) >= _LEAST_BYTES


def with_native_products(model: Transformer, *, always: bool = False) -> Transformer:
    """Returns a copy that shares memory and whose matrices use the native kernels; it is not for training.

    Products of many rows use PyTorch's kernels, which are faster for them, unless `always` is set.
    """
    replaced = {}
    for weight in _matrices(model):
        if isinstance(weight, StoredWeight):
            made = StoredWeight(weight.stored, weight.numbers, weight.scales, weight.dtype, weight.offsets)
        else:
            made = StoredWeight(_FORMATS[weight.dtype], weight.detach(), None, weight.dtype)
        made.always_native = always
        replaced[weight] = nn.Parameter(made, requires_grad=False)
    return model.sharing_copy(replaced)


def can_be_batch_invariant(model: Transformer) -> bool:
    """Whether the native kernels can compute all products of this network; they have none for latents."""
    has_latents = model.config.latent_attention is not None
    if model.device.type != "cpu" or model.dtype != torch.float32 or has_latents or not has_kernels():
        return False
    return all(cast(StoredWeight, weight).kernel is not None for weight in _matrices(with_native_products(model)))


def _matrices(model: Transformer) -> list[nn.Parameter]:
    """Returns the weights of linear layers, routers and experts in a data type of the kernels, tied weights once."""
    found: dict[nn.Parameter, None] = {}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Router | Experts):
            dimensions = 3 if isinstance(layer, Experts) else 2
            found |= dict.fromkeys(weight for weight in layer.parameters(recurse=False) if weight.ndim == dimensions)
    return [weight for weight in found if weight.dtype in _FORMATS]
