"""Chains of cheap operations as one kernel on a GPU, where each of them alone would read and write all of memory."""

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
    """Whether functions under `fused` become kernels of their own on this device: a GPU, with Triton installed."""
    return device == "cuda" and has_triton()


def fused(function: Callable[P, Result]) -> Callable[P, Result]:
    """`function`, whose first argument is a tensor: compiled where `fuses` says so, elsewhere as it is.

    Compiled once for all sizes, at the first call. Inside a network that is compiled already it is a part of it.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, Tensor)
        if torch.compiler.is_compiling() or not fuses(first.device.type):
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return chosen
