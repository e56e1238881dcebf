"""The arithmetic of the forward pass. Weights, gradients and the optimizer's state are float32 in every precision.

``bf16`` computes on a working copy of the weights (`sheepop.train.network`). ``fp16`` computes matrix products in two
bytes by autocast and scales the loss (`sheepop.train.loss_scale`). ``fp8`` is autocast to bf16 with the products of
the blocks in one byte (`sheepop.train.float8`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from sheepop.core.errors import DeviceError
from sheepop.core.speed import matrix_peak
from sheepop.train.float8 import check_float8, use_float8

# What autocast computes matrix products in.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(device: str, precision: str) -> AbstractContextManager[None]:
    """The autocast context of a resolved precision."""
    return torch.autocast(device, dtype=torch_dtype(precision), enabled=precision != "fp32")


def torch_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products in a resolved precision; of those outside the blocks for ``fp8``."""
    return _DTYPES[precision]


def apply_precision(model: nn.Module, precision: str) -> None:
    """Changes what a precision changes in the network itself: the blocks' linear layers for ``fp8``, else nothing."""
    if precision == "fp8":
        use_float8(model)


def choose_matrix_arithmetic(device: str) -> None:
    """Lets float32 matrix products on an NVIDIA GPU use TensorFloat-32, for this process; to be called once.

    Factors are rounded to 10 bits of fraction and summed in float32, which is several times as fast. Elsewhere
    products of float32 stay exact to its 23 bits.
    """
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")


def working_dtype(precision: str) -> torch.dtype | None:
    """The data type of the weights that training steps compute with, or None when they are the model's own."""
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
    """The precisions worth timing: the one asked for, or for ``auto`` those that `device` may be fast in."""
    if precision != "auto":
        check_precision(precision, device)
        return [precision]
    if device == "cuda":
        # Older GPUs emulate bfloat16, which is slower than float32.
        return ["bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"]
    if device == "cpu" and _cpu_computes_bf16():
        return ["fp32", "bf16"]
    return ["fp32"]


def _try_step(device: str, precision: str) -> None:
    """One product and one attention, forward and backward; raises `RuntimeError` where there is no kernel."""
    x = torch.ones(1, 2, 16, 16, device=device, requires_grad=True)
    with autocast(device, precision):
        heads = x @ x
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.autograd.backward(out.float().sum())


def _cpu_computes_bf16() -> bool:
    """Whether bfloat16 products outrun float32's here: without hardware for them they are 100 times slower."""
    return matrix_peak(torch.bfloat16, "cpu") > matrix_peak(torch.float32, "cpu")
