"""Sampling of large vocabularies by one kernel for a batch of logits, in C++ on a CPU and in Triton on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import address, native_kernels_allowed, native_library
from sheepop.generate.config import GenerationConfig
from sheepop.generate.transfers import upload
from sheepop.model.fused import fuses, power_of_two

_SOURCE = KERNELS / "sampling.cpp"
_SETTINGS = np.dtype(
    [(name, np.float64) for name in ("temperature", "top_p", "min_p", "typical_p")]
    + [(name, np.int64) for name in ("top_k", "seed")]
)
_HOTTEST = torch.finfo(torch.float32).max
# Below this size of vocabulary PyTorch is as fast, and compiling takes seconds.
_LARGE = 2**10
_BLOCK, _WARPS = 4096, 16  # tokens that a Triton program reads at a time, and its warps


def suits_native_sampling(logits: Tensor) -> bool:
    """Whether the native kernel chooses from these logits (B, V)."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return False
    is_wanted = logits.shape[-1] >= _LARGE or bool(native_kernels_allowed())
    return is_wanted and native_library(_SOURCE) is not None


def choose_natively(
    logits: Tensor,
    scores: Tensor,
    configs: Sequence[GenerationConfig],
    seeds: Sequence[int],
    forbidden_ids: Tensor | None = None,
    banned: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """The choices from `scores` (B, V) but for the `forbidden_ids`: (B, 6) in float64, as `Sampler.choose` reads them.

    Tokens that are `banned` in one row are given as pairs of row and token. While it runs, the scores of both are -inf.
    """
    settings, num_forbidden = _settings(configs, seeds), 0 if forbidden_ids is None else len(forbidden_ids)
    found = torch.empty(len(configs), 6, dtype=torch.float64)
    pairs = np.array(banned, np.int64).reshape(-1, 2)
    logits, scores, shape = logits.contiguous(), scores.contiguous(), (len(configs), logits.shape[-1])
    _choose()(
        *(address(name, x, torch.float32, *shape) for name, x in (("logits", logits), ("scores", scores))),
        address("forbidden tokens", forbidden_ids, torch.int64, num_forbidden),
        *(pairs.ctypes.data, settings.ctypes.data, found.data_ptr()),
        *(num_forbidden, len(pairs), *shape, torch.get_num_threads()),
    )
    return found


def suits_triton_sampling(logits: Tensor, configs: Sequence[GenerationConfig]) -> bool:
    """Whether the Triton kernel chooses from these logits (B, V), with these settings."""
    suits = logits.dtype == torch.float32 and fuses(logits.device.type)
    return suits and all(config.typical_p == 1 for config in configs)


def choose_by_triton(
    logits: Tensor, scores: Tensor, configs: Sequence[GenerationConfig], seeds: Sequence[int]
) -> Tensor:
    """The choices from `scores` (B, V) as `choose_natively` returns them, on the device of the logits."""
    # Triton takes a second to load, and not every machine has it.
    from sheepop.generate.triton_sampling import choose

    numbers = torch.from_numpy(_settings(configs, seeds).view(np.int64).reshape(len(configs), -1))
    settings = upload(numbers, logits.device)
    logits, is_same, scores = logits.contiguous(), scores is logits, scores.contiguous()
    found = logits.new_empty(len(configs), 6, dtype=torch.float64)
    gaps, ids = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.int32)
    block = min(_BLOCK, max(32 * _WARPS, power_of_two(logits.shape[-1])))
    choose[(len(configs),)](
        *(logits, scores, settings, found, gaps, ids, logits.shape[-1]), BLOCK=block, SAME=is_same, num_warps=_WARPS
    )
    return found


def _settings(configs: Sequence[GenerationConfig], seeds: Sequence[int]) -> NDArray[np.void]:
    return np.array([_row(config, seed) for config, seed in zip(configs, seeds, strict=True)], dtype=_SETTINGS)


def _row(config: GenerationConfig, seed: int) -> tuple[float, ...]:
    temperature = min(config.temperature, _HOTTEST)
    return temperature, config.top_p, config.min_p, config.typical_p, config.top_k or 0, seed


@cache
def _choose() -> Callable[..., Any]:
    found = native_library(_SOURCE).choose  # type: ignore[union-attr]
    found.argtypes, found.restype = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 5, None
    return found
