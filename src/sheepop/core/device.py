"""The device a command runs on."""

from __future__ import annotations

import os
from typing import Literal

from sheepop.core.errors import DeviceError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def resolve_device(name: str) -> str:
    """``auto`` becomes the best device present; a device that is asked for but absent raises `DeviceError`.

    For ``cuda`` the library of matrix products is told to give the same bits every time, unless the environment says
    otherwise: it looks at its variable once, at the first product, and deterministic training is refused without.
    """
    import torch

    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(device for device, available in present.items() if available)
    if name not in present:
        raise DeviceError(f"device = {name!r} is not known. Use one of: auto, {', '.join(present)}.")
    if not present[name]:
        usable = ", ".join(device for device, available in present.items() if available)
        raise DeviceError(
            f"device = {name!r} was asked for, but torch {torch.__version__} finds none on this machine. "
            f"Usable here: {usable}. Use device=auto, or see `sheepop doctor`."
        )
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return name
