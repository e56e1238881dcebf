"""What a query may see, and what is taken off its scores, by the distance to the key."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed_by_distance(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None = None,
    causal: bool = True,
    device: torch.device | str = "cpu",
) -> Tensor:
    """True (T, S) where a query, one of the last T of S places, sees a key.

    Causal queries see the `window` keys up to their own place, others those less than `window` places away.
    """
    offsets_TS = _offsets(num_queries, num_keys, device)
    allowed = offsets_TS >= 0 if causal else torch.ones_like(offsets_TS, dtype=torch.bool)
    return allowed if window is None else allowed & (offsets_TS.abs() < window)


def distance_bias(slopes_H: Tensor, num_queries: int, num_keys: int, device: torch.device | str = "cpu") -> Tensor:
    """``-slope |q - k|`` (H, T, S) in the data type of the slopes (Press et al. 2022, ALiBi)."""
    return -slopes_H.to(device)[:, None, None] * _offsets(num_queries, num_keys, device).abs()


def _offsets(num_queries: int, num_keys: int, device: torch.device | str) -> Tensor:
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    return queries - torch.arange(num_keys, device=device)
