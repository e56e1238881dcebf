"""Matrix products in eight-bit floating point, by torchao, on GPUs that compute in it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sheepop.core.errors import DeviceError

_NATIVE = (8, 9)  # compute capability of Ada; Hopper is 9.0
_MULTIPLE = 16  # what the products' sizes must be divisible by


def check_float8(device: str) -> None:
    """Raises `DeviceError` saying what is missing for training in float8 on `device`."""
    if device != "cuda" or torch.cuda.get_device_capability() < _NATIVE:
        raise DeviceError(
            "training.precision = fp8 needs an NVIDIA GPU that computes in float8 (Ada, Hopper or newer). "
            "Use bf16, or auto."
        )
    if find_spec("torchao") is None:
        raise DeviceError(
            "training.precision = fp8 needs the library torchao, which is not installed. "
            'Install it with: pip install "sheepop[fp8]"'
        )


def use_float8(model: nn.Module, *, emulate: bool = False) -> None:
    """Makes the linear layers inside the blocks compute in float8; weights, names and shapes stay as they are.

    Inputs, weights and gradients are scaled by their greatest value when they are used (Micikevicius et al. 2022,
    "FP8 formats for deep learning"). `emulate` computes the same numbers where the hardware cannot, slowly.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model, config=settings, module_filter_fn=_is_converted)


def _is_converted(module: Any, name: str) -> bool:
    """Whether a layer is one of those: the output head stays as it is, whose errors the loss sees at once."""
    return (
        "blocks." in name
        and isinstance(module, nn.Linear)
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
