"""The arithmetic of the forward pass: float32, or bfloat16 with float32 weights behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from sheepop.core.errors import DeviceError
from sheepop.model.speed import matrix_peak


def autocast(device: str, precision: str) -> AbstractContextManager[None]:
    """The autocast context of a resolved precision, ``fp32`` or ``bf16``."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16")


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype that a resolved precision computes matrix products in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def working_dtype(precision: str) -> torch.dtype | None:
    """The data type of the weights that training steps compute with, or None when they are the model's own."""
    return torch.bfloat16 if precision == "bf16" else None


def check_precision(precision: str, device: str) -> None:
    """Raises `DeviceError` for a precision that `device` cannot compute in."""
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise DeviceError("training.precision = bf16 needs a GPU that computes in bfloat16. Use fp32.")


def candidates(precision: str, device: str) -> list[str]:
    """The precisions worth timing: the one asked for, or for ``auto`` those that `device` may be fast in."""
    if precision != "auto":
        check_precision(precision, device)
        return [precision]
    if device == "cuda":
        # Older GPUs emulate bfloat16, which is slower than float32.
        return ["bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"]
    if device == "cpu" and _cpu_computes_bf16():
        return ["fp32", "bf16"]
    return ["fp32"]


def _cpu_computes_bf16() -> bool:
    """Whether bfloat16 products outrun float32's here: without hardware for them they are 100 times slower."""
    return matrix_peak(torch.bfloat16, "cpu") > matrix_peak(torch.float32, "cpu")
