"""The matrix products of all experts, in one call if PyTorch has a kernel; forward, backward, and for the compiler."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

# The data types of `torch.nn.functional.grouped_mm`; the bytes of a row must be a multiple of _ALIGNMENT.
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ALIGNMENT = 16


def grouped_product(rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns ``rows @ weight[e]^T`` (M, O) for the rows of each expert e, which end at `ends_E[e]` (int32).

    Under autocast the product has its data type. Rows that the grouped kernel cannot align, and float64, use one
    product for each expert. Weights with a ``__torch_function__`` handle the call.
    """
    if has_torch_function_unary(weight_EOI):
        return handle_torch_function(grouped_product, (weight_EOI,), rows_MI, weight_EOI, ends_E)
    device = rows_MI.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_MI, weight_EOI = rows_MI.to(dtype), weight_EOI.to(dtype)
    # Only for bfloat16 on a GPU can PyTorch infer the shapes of its kernel and compile it.
    shapes_only = torch.compiler.is_compiling() or isinstance(rows_MI, FakeTensor)
    if shapes_only and not (rows_MI.is_cuda and rows_MI.dtype == torch.bfloat16):
        return _grouped_product(rows_MI, weight_EOI, ends_E)
    return _product(rows_MI, weight_EOI.transpose(-2, -1), ends_E)


def _product(rows_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Returns ``rows @ weight[e]`` for the rows of each expert e (M, O)."""
    if rows_MI.device.type == "cpu" and len(rows_MI) < len(weight_EIO) and not torch.is_grad_enabled():
        return _product_of_few(rows_MI, weight_EIO, ends_E.tolist())
    if _has_kernel(rows_MI.dtype, *weight_EIO.shape[1:]):
        return F.grouped_mm(rows_MI, weight_EIO, offs=ends_E)
    parts = torch.split(rows_MI, _sizes(ends_E))
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EIO, strict=True)])


def _product_of_few(rows_MI: Tensor, weight_EIO: Tensor, ends: list[int]) -> Tensor:
    """Computes `_product` for fewer rows than experts, as in generation, and skips experts without rows."""
    begins = (0, *ends)
    used = [expert for expert, end in enumerate(ends) if end > begins[expert]]
    parts = [rows_MI[begins[expert] : ends[expert]] @ weight_EIO[expert] for expert in used]
    return torch.cat(parts) if parts else rows_MI.new_empty(0, weight_EIO.shape[2])


def _weight_gradient(gradient_MO: Tensor, rows_MI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns ``gradient[e]^T rows[e]`` over the rows of each expert e (E, O, I)."""
    if _has_kernel(rows_MI.dtype, gradient_MO.shape[1], rows_MI.shape[1]):
        return F.grouped_mm(gradient_MO.t(), rows_MI, offs=ends_E)
    parts = (torch.split(tensor, _sizes(ends_E)) for tensor in (gradient_MO, rows_MI))
    return torch.stack([gradient.t() @ rows for gradient, rows in zip(*parts, strict=True)])


def _has_kernel(dtype: torch.dtype, *widths: int) -> bool:
    return dtype in _DTYPES and all(width * dtype.itemsize % _ALIGNMENT == 0 for width in widths)


def _sizes(ends_E: Tensor) -> list[int]:
    return torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()


@torch.library.custom_op("sheepop::grouped_product", mutates_args=())
def _grouped_product(rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return _product(rows_MI, weight_EOI.transpose(-2, -1), ends_E)


@_grouped_product.register_fake
def _shape(rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return rows_MI.new_empty(rows_MI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("sheepop::grouped_product_backward", mutates_args=())
def _backward(gradient_MO: Tensor, rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows and weight."""
    return _product(gradient_MO, weight_EOI, ends_E), _weight_gradient(gradient_MO, rows_MI, ends_E)


@_backward.register_fake
def _backward_shapes(gradient_MO: Tensor, rows_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_MI), torch.empty_like(weight_EOI)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(gradient_MO.contiguous(), *ctx.saved_tensors), None)


_grouped_product.register_autograd(_gradients, setup_context=_keep)
