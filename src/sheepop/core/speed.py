"""The measured and the nominal speed of matrix products on this machine: the denominators of efficiency."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from sheepop.core.measurements import best_known, measurement_key, recall
from sheepop.core.processor_time import ProcessorTime

if TYPE_CHECKING:
    import torch

_SECONDS = 0.5
_GLANCE = 0.2  # of these, for a machine whose record is known
_SMALLEST = 256
_LARGEST = {"cpu": 2048, "cuda": 8192, "mps": 4096}
_ROUNDS = 4  # of a measurement on a machine whose speed varies, at most
_MOST_SECONDS = 3.0  # after which no round begins
_STABLE = 0.05  # a measurement ends when a round betters the best so far by at most this share
_SHARE_SECONDS = 0.3


@cache
def processor_share(device: str = "cpu") -> float:
    """The share of its processors that this process gets now, in a third of a second of matrix products; 1 on a GPU."""
    import torch

    if device != "cpu":
        return 1.0
    time_of = ProcessorTime()
    with time_of.counted():
        _best_rate(_SMALLEST, torch.float32, device, _SHARE_SECONDS)
    return time_of.take()


def best_of_rounds(measure: Callable[[], float]) -> float:
    """The best of short measurements: until one betters the best before by at most 5 percent, or four, or 3 seconds.

    Other programs only make a machine slower, so the best counts.
    """
    best, until = 0.0, time.monotonic() + _MOST_SECONDS
    for _ in range(_ROUNDS):
        before, best = best, max(best, measure())
        if best <= (1 + _STABLE) * before or time.monotonic() > until:
            break
    return best


def share_of_peak(rate: float, peak: float) -> float:
    """The share of a measured peak, at most 1: a higher rate shows that the peak was measured on a busy machine."""
    return rate / max(rate, peak)


@cache
def matrix_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """The record of `measure_matrix_peak` on this machine; a process that finds one measures a tenth of a second."""
    if recall(_key(dtype, device), float) is None:
        return measure_matrix_peak(dtype, device)
    return best_known(_key(dtype, device), _round_of_products(dtype, device, _GLANCE * _SECONDS))


def measure_matrix_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """The best rate of square matrix products, in FLOP/s, of rounds of half a second; the record is remembered."""
    return best_known(_key(dtype, device), best_of_rounds(lambda: _round_of_products(dtype, device, _SECONDS)))


def _round_of_products(dtype: torch.dtype, device: str, seconds: float) -> float:
    """The best rate of a square matrix product seen in about so many seconds, in FLOP/s.

    Sizes grow from 256, and each is tried only if it is expected to fit the time left: a data type without hardware
    support can be hundreds of times slower than float32. The best of many products counts, since another program may
    delay any single one.
    """
    deadline = time.perf_counter() + seconds
    size, best = _SMALLEST, _best_rate(_SMALLEST, dtype, device, seconds / 10)
    while size < _LARGEST.get(device, _LARGEST["cpu"]):
        if 2 * _operations(2 * size) / best > deadline - time.perf_counter():  # at least two products
            break
        size *= 2
        best = max(best, _best_rate(size, dtype, device, seconds / 10))
    return max(best, _best_rate(size, dtype, device, deadline - time.perf_counter()))


def _key(dtype: torch.dtype, device: str) -> str:
    return measurement_key("matrix peak", device, str(dtype))


def read_bandwidth(device: str = "cpu") -> float:
    """The best rate at which all threads together read memory that no cache holds, in bytes per second.

    It is measured in about half a second, by sums of a quarter of a GB, on a GPU of 2 GB.
    """
    import torch

    numbers = torch.ones(2**29 if device == "cuda" else 2**26, device=device)
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        synchronize(device)
        started = time.perf_counter()
        numbers.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


# TFLOP/s of dense products with float32 accumulation, from data sheets. The first row whose name is in the device's
# name counts. Columns: bfloat16 and float16, float8, and float32 factors as TensorFloat-32 (on AMD in float32 itself).
_NOMINAL_TERAFLOPS: tuple[tuple[str, float, float | None, float], ...] = (
    ("GB200", 2500, 5000, 1250),
    ("B200", 2250, 4500, 1125),
    ("GH200", 989.4, 1978.9, 494.7),
    ("H200 NVL", 835.5, 1671, 417.5),
    ("H200", 989.4, 1978.9, 494.7),
    ("H100 NVL", 835.5, 1671, 417.5),
    ("H100 PCIe", 756, 1513, 378),
    ("H100", 989.4, 1978.9, 494.7),
    ("A100", 312, None, 156),
    ("A10G", 70, None, 35),
    ("A10", 125, None, 62.5),
    ("A40", 149.7, None, 74.8),
    ("L40S", 362, 733, 183),
    ("L40", 181, 362, 90.5),
    ("L4", 121, 242.5, 60),
    ("RTX 6000 Ada", 364.2, 728.5, 182.1),
    ("RTX 4090", 165.2, 330.3, 82.6),
    ("RTX 3090", 71, None, 35.6),
    ("MI300X", 1307.4, 2614.9, 163.4),
    ("MI250X", 383, None, 47.9),
)


def nominal_peak(dtype: torch.dtype, device: str = "cuda") -> float | None:
    """Returns the manufacturer's rate of dense matrix products in `dtype` on this GPU, in FLOP/s, or None if unknown.

    Published utilisations refer to this peak; no product reaches it, because it ignores limits on power and clocks.
    Float32 is TensorFloat-32 where training uses that. Sources: the data sheets of NVIDIA (without sparsity) and AMD.
    """
    import torch

    if device != "cuda":
        return None
    found = nominal_teraflops(torch.cuda.get_device_name())
    if found is None:
        return None
    half, eighth, single = found
    rates = {torch.bfloat16: half, torch.float16: half, torch.float8_e4m3fn: eighth, torch.float32: single}
    rate = rates.get(dtype)
    return None if rate is None else rate * 1e12


def nominal_teraflops(name: str) -> tuple[float, float | None, float] | None:
    """Returns the TFLOP/s of the GPU with this name in bfloat16, float8 and TensorFloat-32, or None if unknown."""
    for part, half, eighth, single in _NOMINAL_TERAFLOPS:
        if re.search(rf"\b{part}\b", name):
            return half, eighth, single
    return None


def _best_rate(size: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Returns the FLOP/s of the fastest of the products that begin within `seconds`, at least two."""
    import torch

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
    """Waits until `device` has finished its queued work, so that times are correct."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
