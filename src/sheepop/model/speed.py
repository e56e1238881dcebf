"""How fast this machine multiplies matrices: the denominator of every statement about efficiency."""

from __future__ import annotations

import time

import torch

_SECONDS = 0.4
_PROBE = 256
_SIZES = {"cpu": 1536, "cuda": 8192, "mps": 4096}


def matrix_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """The best rate of a square matrix product seen in about half a second, in FLOP/s.

    A small product is timed first: where a data type has no hardware support it can be hundreds of times slower
    than float32, and then the small product is all that is measured.
    """
    probe = _rate(_PROBE, dtype, device, repeats=2)
    size = _SIZES.get(device, _SIZES["cpu"])
    if 2 * size**3 / probe > _SECONDS:
        return probe
    best, started = probe, time.perf_counter()
    while time.perf_counter() - started < _SECONDS:
        best = max(best, _rate(size, dtype, device, repeats=1))
    return best


def _rate(size: int, dtype: torch.dtype, device: str, *, repeats: int) -> float:
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first product also pays for the kernel's set-up
        synchronize(device)
        started = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def synchronize(device: str) -> None:
    """Waits until `device` has done what it was given, so that a clock reads true."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
