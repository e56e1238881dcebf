"""Replaces products of matrices and fused attention on the CPU by writing numbers where their results would stand.

What is left of a step is everything that is not a product, in any data type, on machines that multiply it slowly too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from sheepop.model.attention import products

_LIBRARY = torch.library.Library("aten", "IMPL")
_VALUE = 0.01  # an ordinary number: others would be slow for reasons of their own


def skip_products() -> None:
    """From now on, in this process, results of products and of attention mean nothing; it cannot be undone."""
    warnings.filterwarnings("ignore", "Warning only once for all operators,  other operators may also be overridden")
    for name, replacement in {
        "mm": lambda one, other: _written(one.new_empty(one.shape[0], other.shape[1])),
        "mm.out": lambda one, other, *, out: _written(out),
        "bmm": lambda one, other: _written(one.new_empty(*one.shape[:2], other.shape[2])),
        "bmm.out": lambda one, other, *, out: _written(out),
        "addmm": lambda added, one, other, **_: _written(one.new_empty(one.shape[0], other.shape[1])),
        "addmm.out": lambda added, one, other, *, out, **_: _written(out),
        "addmm_": lambda added, one, other, **_: _written(added),
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_gradients,
    }.items():
        _LIBRARY.impl(name, replacement, "CPU")
    products.HAS_BFLOAT16_PRODUCTS = False  # attention is left out by the name of PyTorch's kernel


def _written(result: Tensor) -> Tensor:
    return result.fill_(_VALUE)


def _heads(like_BHTC: Tensor, width: int) -> Tensor:
    """Heads (B, H, T, width) that lie in memory as the kernel leaves them."""
    batch, heads, length, _ = like_BHTC.shape
    return _written(like_BHTC.new_empty(batch, length, heads, width)).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = q.shape
    sums = q.new_empty(batch, length, heads, dtype=torch.float32)
    return _heads(q, v.shape[3]), _written(sums).transpose(1, 2)


def _attention_gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, ...]:
    return tuple(_heads(part, part.shape[3]) for part in (q, k, v))
