"""What logits of a large vocabulary say about tokens, by a native kernel on a CPU that never writes the logits."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import address, name_of, native_kernels_allowed, native_library

_SOURCE = KERNELS / "scoring.cpp"
_DTYPES = (torch.float32, torch.bfloat16)
# With fewer rows, or a matrix that fits the processor's cache, PyTorch is as fast.
_LEAST_ROWS, _LEAST_BYTES = 16, 16 << 20
_PART = 1 << 14  # rows of the vocabulary at a time


class Found(NamedTuple):
    """Scores of M tokens in R rows.

    `own` (M,) is the logit of each token, and `larger` (M,) the number of larger logits in its row. `likeliest` (R,) is
    the likeliest token of each row, and `top` (R,) its logit. `log_sum` (R,) is the logarithm of the sum of the
    exponentials of the logits, in float64.
    """

    own: Tensor
    larger: Tensor
    top: Tensor
    likeliest: Tensor
    log_sum: Tensor


def matrix_rows(weight: Tensor, rows: slice) -> Tensor:
    """Returns rows of a matrix as plain numbers; weights with a ``__torch_function__`` handle the call."""
    if has_torch_function_unary(weight):
        return handle_torch_function(matrix_rows, (weight,), weight, rows)
    return weight.detach()[rows]


def suits_native_scoring(hidden_RD: Tensor, weight_VD: Tensor) -> bool:
    """Whether the native kernel can score the tokens that follow these hidden states."""
    if hidden_RD.device.type != "cpu" or hidden_RD.dtype not in _DTYPES or weight_VD.dtype not in _DTYPES:
        return False
    large = len(hidden_RD) >= _LEAST_ROWS and weight_VD.numel() * weight_VD.itemsize >= _LEAST_BYTES
    return (native_kernels_allowed() or large) and native_library(_SOURCE) is not None


def score_natively(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    soft_cap: float | None,
    tokens_M: Tensor,
    rows_M: Tensor,
) -> Found:
    """Scores each token as the next one after the hidden state in its row; `rows_M` are ascending.

    Results that compare logits, and logits within 4 of the largest, are those of float32; the small rest of the sum
    comes from integers of 16 bits, see ``scoring.cpp``.
    """
    x_RD, threads = hidden_RD.float().contiguous(), torch.get_num_threads()
    bias_V = None if bias_V is None else bias_V.detach().float().contiguous()
    bounds = torch.searchsorted(rows_M, torch.arange(len(x_RD) + 1))
    cap, (count, width) = soft_cap or 0.0, x_RD.shape
    own, larger = torch.empty(len(tokens_M)), torch.zeros(len(tokens_M), dtype=torch.int64)
    top, places = torch.full((count,), -torch.inf), torch.full((count,), len(weight_VD))
    sums = torch.zeros(count, dtype=torch.float64)
    of_tokens = torch.nn.functional.embedding(tokens_M, weight_VD.detach()).contiguous()
    bias_M = None if bias_V is None else bias_V[tokens_M]
    _kernel("own_logits", of_tokens.dtype)(
        *_addresses(x_RD, of_tokens, bias_M, bounds),
        own.data_ptr(),
        *(cap, count, width, threads),
    )
    for begin in range(0, len(weight_VD), _PART):
        part = matrix_rows(weight_VD, slice(begin, begin + _PART)).contiguous()
        _kernel("score", part.dtype)(
            *_addresses(x_RD, part, None if bias_V is None else bias_V[begin : begin + _PART], bounds),
            *(results.data_ptr() for results in (own, top, places, sums, larger)),
            *(cap, count, width, len(part), begin, threads),
        )
    return Found(own, larger, top, places, top.double() + sums.log())


def _addresses(x_RD: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor) -> list[int | None]:
    rows, width = x_RD.shape
    return [
        address("x", x_RD, torch.float32, rows, width),
        address("weight", weight, weight.dtype, len(weight), width),
        address("bias", bias, torch.float32, len(weight)),
        address("bounds", bounds, torch.int64, rows + 1),
    ]


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    found = getattr(native_library(_SOURCE), f"{name}_{name_of(dtype)}")
    pointers, sizes = (5, 3) if name == "own_logits" else (9, 5)
    found.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_double] + [ctypes.c_int64] * sizes
    found.restype = None
    return found
