"""Chooses the device that a command runs on."""

from __future__ import annotations

import os
from typing import Literal

from sheepop.core.errors import DeviceError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def resolve_device(name: str) -> str:
    """Returns the device for `name`; ``auto`` is the best one present. Raises `DeviceError` for a missing device.

    For ``cuda`` it sets CUBLAS_WORKSPACE_CONFIG, unless the environment has it, so that cuBLAS gives the same bits
    every time. cuBLAS reads it once, at the first product, and PyTorch refuses deterministic training without it.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in present.items() if available)
    if name not in present:
        raise DeviceError(f"device = {name!r} is not known. Use one of: auto, {', '.join(present)}.")
    if not present[name]:
        usable = ", ".join(device for device, available in present.items() if available)
        raise DeviceError(
            f"device = {name!r} was requested, but torch {torch.__version__} finds none on this machine. "
            f"Usable here: {usable}. Use device=auto, or see `sheepop doctor`."
        )
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return name
