"""Products of float weights by the project's own kernels, faster than PyTorch for a few rows on a CPU.

Weights of 16 bits stay as they are stored; the kernels widen them, which is exact, and compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import ALIGNED, Format, StoredWeight, has_kernels
from sheepop.adapt.tiles import SOURCE as SOURCE_OF_INTEGERS
from sheepop.core.memory_placement import move_to_huge_pages
from sheepop.core.native import name_of, native_kernels_allowed, native_library, say_once
from sheepop.model import Transformer
from sheepop.model.experts import Experts, Router
from sheepop.model.ngrams import NgramEmbedding

_FORMATS: dict[torch.dtype, Format] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
# Matrices that fit the processor's cache gain little, and compiling takes seconds.
_LEAST_BYTES = 16 * 2**20


def wants_native_kernels(model: Transformer) -> bool:
    """Whether native kernels are worth compiling: for integers or large matrices, on a CPU."""
    if model.device.type != "cpu" or model.dtype not in _FORMATS:
        return False
    allowed = native_kernels_allowed()
    if allowed is not None:
        return allowed
    integers = any(isinstance(weight, StoredWeight) and weight.has_scales for weight in model.parameters())
    return integers or sum(weight.nbytes for weight in matrices(model)) >= _LEAST_BYTES


def with_native_products(model: Transformer, *, always: bool = False, rounded: bool = False) -> Transformer:
    """Returns a copy that shares memory and whose matrices use the native kernels; it is not for training.

    Products of many rows use another kernel where one is faster, unless `always` is set. With `rounded`, the
    inputs of products are rounded to the kind of the weights where a kernel does that; so are those of copies of it.
    Matrices move into huge pages meanwhile.

    If all matrices of a model in 16 bits have kernels, the copy computes in float32: its matrices and embeddings share
    the memory of the original, its other weights are copies, and its cache has the original's data type.
    """
    made = {weight: _stored(weight, weight.dtype) for weight in matrices(model)}
    is_half = model.dtype.itemsize < torch.float32.itemsize
    widens = is_half and model.config.latent_attention is None
    widens = widens and all(weight.kernel is not None for weight in made.values())
    if is_half and not widens and has_kernels():
        lacking = next(filter(None, map(missing_kernel, made.values())), "latents")
        say_once(
            f"This model computes in 16 bits in PyTorch, which is slower, because SheepOp's kernels lack {lacking}."
        )
    replaced: dict[Any, Any] = {}  # parameters and buffers
    if widens:
        tables = [weight for layer in model.modules() for weight in _tables(layer)]
        made = {weight: _stored(weight, torch.float32) for weight in (*made, *tables)}
        others = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in made)
        replaced = {tensor: _widened(tensor) for tensor in others}
    for weight, stored in made.items():
        stored.always_native, stored.wants_rounding = always, rounded or stored.wants_rounding
        replaced[weight] = nn.Parameter(stored, requires_grad=False)
    move_to_huge_pages(part for stored in made.values() for part in stored.memory)
    copy = model.sharing_copy(replaced)
    if widens:
        copy.cache_dtype = model.dtype
    return copy


def missing_kernel(weight: Tensor) -> str | None:
    """What native kernels lack for products with `weight`; None if there is one."""
    if not isinstance(weight, StoredWeight):
        return f"weights in {name_of(weight.dtype)}"
    if weight.kernel is not None:
        return None
    if weight.row_length % ALIGNED:
        return f"rows whose length is no multiple of {ALIGNED}"
    are_integers = weight.stored in ("int8", "int4")
    if not has_kernels() or (are_integers and native_library(SOURCE_OF_INTEGERS) is None):
        return f"products with weights in {weight.stored} on this machine"
    return f"weights in {weight.stored}" + ("" if weight.group is None else f" in groups of {weight.group}")


def formats_with_rounding() -> list[str]:
    """The formats of weights for which this machine has kernels with rounded inputs, compiled now if they must be."""
    codes, scales = torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1)
    made = {
        "int8": StoredWeight("int8", codes, scales[:, 0], torch.float32),
        "int8 in groups": StoredWeight("int8", codes, scales, torch.float32),
        "int4": StoredWeight("int4", codes[:, :16].view(torch.uint8), scales, torch.float32),
        "bfloat16": StoredWeight("bfloat16", codes.bfloat16(), None, torch.bfloat16),
    }
    for weight in made.values():
        weight.wants_rounding = True
    return [name for name, weight in made.items() if weight.rounds_inputs]


def can_be_batch_invariant(model: Transformer) -> bool:
    """Whether the native kernels can compute all products of this network; they have none for latents."""
    has_latents = model.config.latent_attention is not None
    if model.device.type != "cpu" or model.dtype != torch.float32 or has_latents or not has_kernels():
        return False
    return all(cast(StoredWeight, weight).kernel is not None for weight in matrices(with_native_products(model)))


def _stored(weight: Tensor, dtype: torch.dtype) -> StoredWeight:
    if isinstance(weight, StoredWeight):
        return weight.computing_in(dtype)
    return StoredWeight(_FORMATS[weight.dtype], weight.detach(), None, dtype)


def _widened(tensor: Tensor) -> Tensor:
    """A copy in float32 of a tensor in 16 bits; others as they are."""
    if tensor.dtype not in _FORMATS or tensor.dtype.itemsize == 4:
        return tensor
    wide = tensor.detach().float()
    return nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide


def _tables(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of an embedding, if the kernels have their data type."""
    if isinstance(layer, nn.Embedding | NgramEmbedding):
        yield from (weight for weight in layer.parameters(recurse=False) if weight.dtype in _FORMATS)


def matrices(network: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of linear layers, routers and experts in a data type of the kernels, tied weights once."""
    found: dict[nn.Parameter, None] = {}
    for layer in network.modules():
        if isinstance(layer, nn.Linear | Router | Experts):
            dimensions = 3 if isinstance(layer, Experts) else 2
            found |= dict.fromkeys(weight for weight in layer.parameters(recurse=False) if weight.ndim == dimensions)
    return [weight for weight in found if weight.dtype in _FORMATS]
