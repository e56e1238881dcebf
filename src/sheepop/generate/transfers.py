"""Copies between host and device that do not wait for the work of the device, and a wait for all of it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on the device; its own memory may be changed or freed at once."""
    if device.type != "cuda" or not tensor.numel() or not torch.cuda.is_available():
        return tensor.to(device)
    # From memory that the system cannot move, which PyTorch keeps until it was read.
    return tensor.pin_memory().to(device, non_blocking=True)


def with_sampled(token_ids: Tensor, sampled: Tensor | None) -> Tensor:
    """Puts tokens that were `sampled` last in the place of the negative ids -1 - r that stand for them."""
    if sampled is None:
        return token_ids
    return torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0)], token_ids)


def synchronize(device: torch.device) -> None:
    """Waits for all work of the device; raises `RuntimeError` if it has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Download:
    """A tensor of a device on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrival = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def wait(self) -> Tensor:
        """Returns the tensor on the host, once it is there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._tensor
