"""Fuses chains of cheap operations into one GPU kernel, so that intermediate results are not written to memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._triton import has_triton

P = ParamSpec("P")
Result = TypeVar("Result")


def fuses(device: str) -> bool:
    """Whether `fused` compiles functions on this device: a CUDA GPU with Triton installed."""
    return device == "cuda" and has_triton()


def uses_triton(x: Tensor) -> bool:
    """Whether passes without gradients use kernels in Triton for `x`; generation does not wait for torch to compile."""
    is_plain = fuses(x.device.type) and x.dtype.itemsize <= torch.float32.itemsize
    return is_plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def power_of_two(size: int) -> int:
    """Rounds up to a power of two, as Triton's vectors need."""
    return 1 << (size - 1).bit_length()


def fused(function: Callable[P, Result], elsewhere: Callable[P, Result] | None = None) -> Callable[P, Result]:
    """Returns `function` compiled, if its first argument is a tensor on a device that `fuses`.

    On another device `elsewhere` runs, which computes the same, or `function` as it is.
    The first call compiles it, once for all sizes. Inside an already compiled network it is compiled with the rest.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, Tensor)
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not fuses(first.device.type):
            return (elsewhere or function)(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return chosen
