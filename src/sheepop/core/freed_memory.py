"""Keeps the memory of freed tensors in the process, instead of returning large pieces to the system at once.

A training step frees and allocates the same large pieces again and again. The system provides each of them page by
page, filled with zeros, which can cost a tenth of a step on a CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt(3), and the largest value that it takes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_GROWTH = 64 << 20  # bytes requested from the system at a time

_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(device: str) -> bool:
    """Makes this process keep freed memory for its next use from now on; returns whether that was possible.

    It applies to computation on the CPU with glibc's allocator, unless the environment sets up the allocator
    (`MALLOC_*`, `GLIBC_TUNABLES`). The process then never shrinks.
    """
    if device != "cpu":
        return False  # for GPUs, PyTorch has an allocator that keeps freed memory
    chosen = any(name in os.environ for name in _ENVIRONMENT) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    allocator = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _GROWTH))
    return all(allocator.mallopt(name, value) == 1 for name, value in settings)
