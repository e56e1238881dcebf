"""What becomes of memory that tensors no longer need: by default large pieces go back to the system at once.

A training step frees and asks for the same large pieces again and again. The system hands each of them out page by
page, filled with zeros, which can cost a tenth of a step on a CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt(3), and the largest value that it takes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_GROWTH = 64 << 20  # bytes that are asked of the system at a time

_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(device: str) -> bool:
    """From now on this process keeps memory that it frees for its next use; whether that could be set.

    Only where it computes on the CPU, with glibc's allocator, and not where the environment chooses its settings
    (`MALLOC_*`, `GLIBC_TUNABLES`). The process then stays as large as it has ever been.
    """
    if device != "cpu":
        return False  # GPUs have an allocator of PyTorch, which keeps what is freed
    chosen = any(name in os.environ for name in _ENVIRONMENT) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    allocator = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _GROWTH))
    return all(allocator.mallopt(name, value) == 1 for name, value in settings)
