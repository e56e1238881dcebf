"""Memory for large results of kernels, which stays for the next one: the system takes longer to give new pages."""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import torch
from torch import Tensor

# Bytes from which on allocators give memory back to the system at once, and the most that a thread keeps.
_LEAST, _MOST = 2**25, 2**27
_ALIGNED = 16  # numbers of a cache line
_KEPT = threading.local()
_REFERENCES = 3  # to memory that no tensor has: those of the thread, of `empty`, and of the call that counts them


def empty(*shape: int) -> Tensor:
    """Returns a float32 tensor on the CPU with undefined numbers.

    A large one has the memory of the last one in this thread, unless a tensor still refers to that.
    """
    size = math.prod(shape)
    if not _LEAST <= 4 * size <= _MOST:
        return torch.empty(shape, dtype=torch.float32)
    memory = getattr(_KEPT, "memory", None)
    if memory is None or len(memory) < size + _ALIGNED or sys.getrefcount(memory) > _REFERENCES:
        memory = _KEPT.memory = np.empty(size + _ALIGNED, np.float32)
    begin = -(memory.ctypes.data // memory.itemsize) % _ALIGNED
    return torch.from_numpy(memory)[begin : begin + size].view(shape)
