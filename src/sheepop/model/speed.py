"""How fast this machine multiplies matrices: the denominator of every statement about efficiency."""

from __future__ import annotations

import time
from functools import cache

import torch

_SECONDS = 0.5
_SMALLEST = 256
_LARGEST = {"cpu": 2048, "cuda": 8192, "mps": 4096}


@cache
def matrix_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """The best rate of a square matrix product seen in about half a second, in FLOP/s.

    Sizes grow from 256, each tried only when it is expected to fit the time left: where a data type has no
    hardware support it can be hundreds of times slower than float32. The best of many products counts, since
    another program may hold up any single one. It is measured once in a process.
    """
    deadline = time.perf_counter() + _SECONDS
    size, best = _SMALLEST, _best_rate(_SMALLEST, dtype, device, _SECONDS / 10)
    while size < _LARGEST.get(device, _LARGEST["cpu"]):
        if _operations(2 * size) / best > deadline - time.perf_counter():
            break
        size *= 2
        best = max(best, _best_rate(size, dtype, device, _SECONDS / 10))
    return max(best, _best_rate(size, dtype, device, deadline - time.perf_counter()))


def _best_rate(size: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """FLOP/s of the fastest product, of as many as begin within `seconds`, at least two."""
    until = time.perf_counter() + seconds
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    fastest, count = float("inf"), 0
    while count < 2 or time.perf_counter() < until:
        synchronize(device)
        started = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
        count += 1
    return _operations(size) / fastest


def _operations(size: int) -> int:
    return 2 * size**3


def synchronize(device: str) -> None:
    """Waits until `device` has done what it was given, so that a clock reads true."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
