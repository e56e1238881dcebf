"""The precisions of the forward pass. Weights, gradients and the optimizer's state are float32 in all of them.

``bf16`` computes with working weights (`sheepop.train.placement`). ``fp16`` computes matrix products in float16 by
autocast and scales the loss (`LossScale`). ``fp8`` is autocast to bf16, with the matrix products of the blocks in
float8 by torchao, on GPUs that compute in it (`use_float8`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sheepop.core.errors import DeviceError, TrainingError
from sheepop.core.speed import matrix_peak

# The data types in which autocast computes matrix products.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_NATIVE_FLOAT8 = (8, 9)  # compute capability of Ada; Hopper is 9.0
_FLOAT8_MULTIPLE = 16  # the sizes of float8 products must be divisible by it
_LEAST_SCALE = 1.0
_GROWTH_STEPS = 2000  # steps in a row without overflow before the scale grows


def autocast(device: str, precision: str) -> AbstractContextManager[None]:
    """The autocast context of a resolved precision."""
    return torch.autocast(device, dtype=torch_dtype(precision), enabled=precision != "fp32")


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products in a resolved precision; for ``fp8``, that of products outside the blocks."""
    return _DTYPES[precision]


def apply_precision(model: nn.Module, precision: str) -> None:
    """Replaces the linear layers of the blocks for ``fp8``; the other precisions do not change the network."""
    if precision == "fp8":
        use_float8(model)


def choose_matrix_arithmetic(device: str) -> None:
    """Lets float32 matrix products on an NVIDIA GPU use TensorFloat-32, for the whole process.

    Factors are rounded to 10 bits of fraction and products are summed in float32, which is several times as fast. On
    other devices float32 products keep all 23 bits.
    """
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")


def working_dtype(precision: str) -> torch.dtype | None:
    """The data type of the working weights of training steps, or None if steps use the model's own weights."""
    return torch.bfloat16 if precision == "bf16" else None


def check_precision(precision: str, device: str) -> None:
    """Raises `DeviceError` for a precision that `device` cannot compute in."""
    if precision == "fp8":
        check_float8(device)
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise DeviceError("training.precision = bf16 needs a GPU that computes in bfloat16. Use fp32.")
    if precision == "fp16":
        try:
            _try_step(device, precision)
        except RuntimeError as error:
            raise DeviceError(
                f"training.precision = fp16 does not work on {device} with PyTorch {torch.__version__}: {error}. "
                "Use bf16 or fp32."
            ) from None


def candidates(precision: str, device: str) -> list[str]:
    """The precisions worth timing, the most exact first: the given one, or for ``auto`` those fast on `device`."""
    if precision != "auto":
        check_precision(precision, device)
        return [precision]
    if device == "cuda":
        # Older GPUs emulate bfloat16, which is slower than float32.
        return ["bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"]
    # Without hardware for it, bfloat16 is 100 times slower on a CPU.
    if device == "cpu" and matrix_peak(torch.bfloat16, "cpu") > matrix_peak(torch.float32, "cpu"):
        return ["fp32", "bf16"]
    return ["fp32"]


def _try_step(device: str, precision: str) -> None:
    """Runs a product and an attention forward and backward; raises `RuntimeError` if a kernel is missing."""
    x = torch.ones(1, 2, 16, 16, device=device, requires_grad=True)
    with autocast(device, precision):
        heads = x @ x
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.autograd.backward(out.float().sum())


def check_float8(device: str) -> None:
    """Raises `DeviceError` if `device` or the library for float8 is missing."""
    if device != "cuda" or torch.cuda.get_device_capability() < _NATIVE_FLOAT8:
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
    """Makes the linear layers of the blocks compute in float8; weights, names and shapes do not change.

    Inputs, weights and gradients are scaled by their greatest value at each use (Micikevicius et al. 2022, "FP8 formats
    for deep learning"). `emulate` computes the same numbers slowly on any hardware.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model, config=settings, module_filter_fn=_is_converted)


def _is_converted(module: Any, name: str) -> bool:
    """Whether a layer computes in float8. The output head does not, because its errors affect the loss directly."""
    return (
        "blocks." in name
        and isinstance(module, nn.Linear)
        and module.in_features % _FLOAT8_MULTIPLE == 0
        and module.out_features % _FLOAT8_MULTIPLE == 0
    )


@dataclass(frozen=True)
class LossScale:
    """The scale of the loss in float16, in which most gradients would underflow.

    The loss is multiplied by a power of two before the backward pass and the gradients are divided by it after, so that
    small gradients are not lost (Micikevicius et al. 2018, section 3.2). The run's state contains the scale, the number
    of `good_steps` in a row without overflow, and the number of `skipped_steps` so far.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    skipped_steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """Doubles the scale after 2,000 steps in a row with finite gradients, and halves it after an overflow.

        Raises `TrainingError` if half would be below 1, because then the scale is not what overflows.
        """
        if not finite:
            if self.scale / 2 < _LEAST_SCALE:
                raise TrainingError(
                    f"Gradients overflow float16 even with loss scale {self.scale:g}, after {self.skipped_steps} "
                    "skipped steps. Lower training.learning_rate, or use training.precision = bf16 or fp32."
                )
            return LossScale(self.scale / 2, 0, self.skipped_steps + 1)
        if self.good_steps + 1 == _GROWTH_STEPS:
            return replace(self, scale=self.scale * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


def initial_loss_scale(precision: str) -> LossScale | None:
    """The first scale of a run in `precision`; None except for float16."""
    return LossScale() if precision == "fp16" else None
