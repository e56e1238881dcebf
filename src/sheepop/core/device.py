"""Chooses the device that a command runs on, and sets up its memory."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import TYPE_CHECKING, Literal

from sheepop.core.errors import DeviceError

if TYPE_CHECKING:
    import torch

DeviceName = Literal["auto", "cpu", "cuda", "mps"]

# Parameters of mallopt(3), and the largest value that it takes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_GROWTH = 64 << 20  # bytes requested from the system at a time

_FP8_CAPABILITY = (8, 9)  # the least compute capability of NVIDIA GPUs with 8-bit floats

_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def resolve_device(name: str) -> str:
    """Returns the device for `name`; ``auto`` is the best one present. Raises `DeviceError` for a missing device.

    For ``cuda`` it sets CUBLAS_WORKSPACE_CONFIG, unless the environment has it, so that cuBLAS gives the same bits
    every time. cuBLAS reads it once, at the first product, and PyTorch refuses deterministic training without it.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in present.items() if available)
    if name not in present:
        raise DeviceError(f"device = {name!r} is not known. Use one of: auto, {', '.join(present)}.")
    if not present[name]:
        usable = ", ".join(device for device, available in present.items() if available)
        raise DeviceError(
            f"device = {name!r} was requested, but torch {torch.__version__} finds none on this machine. "
            f"Usable here: {usable}. Use device=auto, or see `sheepop doctor`."
        )
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return name


def has_fp8(device: torch.device) -> bool:
    """Whether this NVIDIA GPU computes in 8-bit floats."""
    import torch

    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def keep_freed_memory(device: str) -> bool:
    """Makes this process keep freed memory for its next use from now on; returns whether that was possible.

    A training step frees and allocates the same large pieces again and again, and the system provides each of them page
    by page, filled with zeros, which can cost a tenth of a step. It applies to computation on the CPU with glibc's
    allocator, unless the environment sets up the allocator (`MALLOC_*`, `GLIBC_TUNABLES`). The process then never
    shrinks.
    """
    if device != "cpu":
        return False  # for GPUs, PyTorch has an allocator that keeps freed memory
    chosen = any(name in os.environ for name in _ENVIRONMENT) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    allocator = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _GROWTH))
    return all(allocator.mallopt(name, value) == 1 for name, value in settings)


def return_freed_memory() -> None:
    """Gives freed memory back to the system, where glibc's allocator is in use.

    Called before something that lasts is allocated, so that what preparing it left behind is not kept beside it.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
