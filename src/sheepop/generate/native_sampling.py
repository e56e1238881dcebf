"""Sampling of large vocabularies by one native call for a batch of logits, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sheepop.core.native import native_kernels_allowed, native_library
from sheepop.generate.config import GenerationConfig

_SOURCE = Path(__file__).parent / "native" / "sampling.cpp"
_SETTINGS = np.dtype(
    [(name, np.float64) for name in ("temperature", "top_p", "min_p", "typical_p")]
    + [(name, np.int64) for name in ("top_k", "seed")]
)
# Below this size of vocabulary PyTorch is as fast, and compiling takes seconds.
_LARGE = 2**10


def suits_native_sampling(logits: Tensor) -> bool:
    """Whether the native kernel chooses from these logits (B, V)."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return False
    wanted = native_kernels_allowed() or logits.shape[-1] >= _LARGE
    return wanted and native_library(_SOURCE) is not None


def choose_natively(
    logits: Tensor, scores: Tensor, configs: Sequence[GenerationConfig], seeds: Sequence[int]
) -> Tensor:
    """The choices from `scores` (B, V): (B, 6) in float64, as `Sampler.choose` reads them."""
    rows = [_row(config, seed) for config, seed in zip(configs, seeds, strict=True)]
    settings = np.array(rows, dtype=_SETTINGS)
    found = torch.empty(len(configs), 6, dtype=torch.float64)
    logits, scores = logits.contiguous(), scores.contiguous()
    _choose()(
        *(logits.data_ptr(), scores.data_ptr(), settings.ctypes.data, found.data_ptr()),
        *(*logits.shape, torch.get_num_threads()),
    )
    return found


def _row(config: GenerationConfig, seed: int) -> tuple[float, ...]:
    return config.temperature, config.top_p, config.min_p, config.typical_p, config.top_k or 0, seed


@cache
def _choose() -> Callable[..., Any]:
    found = native_library(_SOURCE).choose  # type: ignore[union-attr]
    found.argtypes, found.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3, None
    return found
