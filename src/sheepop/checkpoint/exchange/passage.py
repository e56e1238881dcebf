"""Wrappers for tensors that are copied between files: dtype conversion, checks for NaN and infinity, and progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import pieces
from sheepop.core.errors import CheckpointError, UsageError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Buffers, which are always float32.
_KEPT = (".router.balance",)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype called `name`, None for None; raises `UsageError` for an unknown name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known. Give one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def converted(tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Converts tensors to `dtype` (None keeps theirs); reading one raises `CheckpointError` if a number overflows."""

    def convert(name: str, tensor: LazyTensor) -> Tensor:
        source = tensor.read()
        result = source.to(dtype)
        if not _is_finite(result) and _is_finite(source):
            raise CheckpointError(
                f"{name} has numbers up to {source.abs().max().item():.4g}, too large for {dtype}. Choose bfloat16, "
                "or keep the dtype."
            )
        return result

    return {
        name: tensor
        if dtype in (None, tensor.dtype) or name.endswith(_KEPT)
        else replace(tensor, dtype=dtype, read=partial(convert, name, tensor))
        for name, tensor in tensors.items()
    }


def watched(tensors: Mapping[str, LazyTensor], not_finite: list[str]) -> dict[str, LazyTensor]:
    """Wraps tensors so that reading one that contains NaN or infinity appends its name to `not_finite`."""

    def watch(name: str, tensor: LazyTensor) -> Tensor:
        found = tensor.read()
        if name not in not_finite and not _is_finite(found):
            not_finite.append(name)
        return found

    return {name: replace(tensor, read=partial(watch, name, tensor)) for name, tensor in tensors.items()}


def reported(tensors: Mapping[str, LazyTensor], advance: Callable[[float], None]) -> dict[str, LazyTensor]:
    """Wraps tensors so that reading one calls `advance` with its number of bytes."""

    def report(tensor: LazyTensor) -> Tensor:
        found = tensor.read()
        advance(tensor.num_bytes)
        return found

    return {name: replace(tensor, read=partial(report, tensor)) for name, tensor in tensors.items()}


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in pieces(tensor.contiguous()))
