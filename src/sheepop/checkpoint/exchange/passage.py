"""Tensors on their way from file to file: in another dtype, watched for what is no number, counted for the progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import pieces
from sheepop.core.errors import CheckpointError, UsageError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Buffers, which are float32 in every model.
_KEPT = (".router.balance",)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None for None. Raises `UsageError` for another name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known. Give one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def converted(tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """The same tensors in `dtype`, None for their own. Reading one raises `CheckpointError` when a number overflows."""
    return {
        name: tensor
        if dtype in (None, tensor.dtype) or name.endswith(_KEPT)
        else replace(tensor, dtype=dtype, read=_converting(name, tensor, dtype))
        for name, tensor in tensors.items()
    }


def watched(tensors: Mapping[str, LazyTensor], not_finite: list[str]) -> dict[str, LazyTensor]:
    """The same tensors; the name of each that holds NaN or infinity is put into `not_finite` when it is read."""

    def reading(name: str, tensor: LazyTensor) -> Callable[[], Tensor]:
        def read() -> Tensor:
            found = tensor.read()
            if name not in not_finite and not _is_finite(found):
                not_finite.append(name)
            return found

        return read

    return {name: replace(tensor, read=reading(name, tensor)) for name, tensor in tensors.items()}


def reported(tensors: Mapping[str, LazyTensor], advance: Callable[[float], None]) -> dict[str, LazyTensor]:
    """The same tensors; `advance` hears of the bytes of each that is read."""

    def reading(tensor: LazyTensor) -> Callable[[], Tensor]:
        def read() -> Tensor:
            found = tensor.read()
            advance(tensor.num_bytes)
            return found

        return read

    return {name: replace(tensor, read=reading(tensor)) for name, tensor in tensors.items()}


def _converting(name: str, tensor: LazyTensor, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    def read() -> Tensor:
        source = tensor.read()
        result = source.to(dtype)
        if not _is_finite(result) and _is_finite(source):
            raise CheckpointError(
                f"{name} has numbers up to {source.abs().max().item():.4g}, more than {dtype} can hold. Choose "
                "bfloat16, or keep the dtype."
            )
        return result

    return read


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in pieces(tensor.contiguous()))
