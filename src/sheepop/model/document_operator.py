"""Attention within documents as one operator of PyTorch, for networks that are compiled for a CPU.

Where documents begin differs from batch to batch. Code that was compiled for one batch would not fit the next, so the
compiler sees a single operator here and does not look into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sheepop.model.documents import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("sheepop::document_attention", mutates_args=(), device_types="cpu")
def document_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within documents (B, T, H, C), and the logarithms of the softmax's sums (B T, H).

    `documents_BT` are running numbers. The result equals that of `attend_in_segments` without dropout.
    """
    segments = Segments.of(documents_BT)
    outputs, sums = [], []
    for q, k, v in zip(*(_by_group(heads, segments) for heads in (q_BHTC, k_BKTC, v_BKTC)), strict=True):
        out, log_sums = _forward(q, _repeat(k, q), _repeat(v, q), is_causal=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        sums.append(log_sums.transpose(1, 2).flatten(0, 1))
    out, log_sums = (torch.cat(parts).index_select(0, segments.scatter) for parts in (outputs, sums))
    batch, heads, length, width = q_BHTC.shape
    return out.view(batch, length, heads, width), log_sums


@document_attention.register_fake
def _shapes(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q_BHTC.shape
    sums = torch.float64 if q_BHTC.dtype == torch.float64 else torch.float32
    return q_BHTC.new_empty(batch, length, heads, width), q_BHTC.new_empty(batch * length, heads, dtype=sums)


@torch.library.custom_op("sheepop::document_attention_backward", mutates_args=(), device_types="cpu")
def _document_attention_backward(
    gradient_BTHC: Tensor,
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    documents_BT: Tensor,
    out_BTHC: Tensor,
    log_sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each (B, T, heads, C)."""
    segments = Segments.of(documents_BT)
    sizes = [count * padded for count, padded in segments.groups]
    # The gradient of a padded place is zero, so that its query, a copy of another, adds nothing to any key.
    gradient = gradient_BTHC.new_zeros(len(segments.gather), *gradient_BTHC.shape[2:])
    gradient.index_copy_(0, segments.scatter, gradient_BTHC.flatten(0, 1))
    places = (out_BTHC.flatten(0, 1).index_select(0, segments.gather), log_sums.index_select(0, segments.gather))
    gradients: tuple[list[Tensor], ...] = ([], [], [])
    for group, q, k, v, *rest in zip(
        segments.groups,
        *(_by_group(heads, segments) for heads in (q_BHTC, k_BKTC, v_BKTC)),
        *(torch.split(part, sizes) for part in (gradient, *places)),
        strict=True,
    ):
        gradient_out, out, sums = (_of_documents(part, group) for part in rest)
        found = _backward(gradient_out, q, _repeat(k, q), _repeat(v, q), out, sums, 0.0, True)
        for of_heads, kept, part in zip((q, k, v), gradients, found, strict=True):
            kept.append(_sum_repeated(part, of_heads).transpose(1, 2).flatten(0, 1))
    gradient_q, gradient_k, gradient_v = (
        torch.cat(parts).index_select(0, segments.scatter).view(*documents_BT.shape, *parts[0].shape[1:])
        for parts in gradients
    )
    return gradient_q, gradient_k, gradient_v


@_document_attention_backward.register_fake
def _backward_shapes(
    gradient_BTHC: Tensor,
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    documents_BT: Tensor,
    out_BTHC: Tensor,
    log_sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    gradient_q, gradient_k, gradient_v = (
        heads.new_empty(*documents_BT.shape, heads.shape[1], heads.shape[3]) for heads in (q_BHTC, k_BKTC, v_BKTC)
    )
    return gradient_q, gradient_k, gradient_v


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, gradient_BTHC: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _document_attention_backward(gradient_BTHC.contiguous(), *ctx.saved_tensors)
    return (*(gradient.transpose(1, 2) for gradient in found), None)


document_attention.register_autograd(_gradients, setup_context=_keep)


def _by_group(heads_BHTC: Tensor, segments: Segments) -> list[Tensor]:
    """The heads of every group's documents, (documents, heads, padded length, C)."""
    batch, heads, length, width = heads_BHTC.shape
    places = heads_BHTC.transpose(1, 2).reshape(batch * length, heads, width).index_select(0, segments.gather)
    parts = torch.split(places, [count * padded for count, padded in segments.groups])
    return [_of_documents(part, group) for part, group in zip(parts, segments.groups, strict=True)]


def _of_documents(places: Tensor, group: tuple[int, int]) -> Tensor:
    """The places of one group as (documents, heads, padded length, ...)."""
    return places.view(*group, *places.shape[1:]).transpose(1, 2)


def _repeat(few: Tensor, many: Tensor) -> Tensor:
    """Each key-value head once for every query head that it serves."""
    times = many.shape[1] // few.shape[1]
    return few if times == 1 else few.repeat_interleave(times, dim=1)


def _sum_repeated(gradient: Tensor, few: Tensor) -> Tensor:
    """The gradient of heads that `_repeat` repeated."""
    if gradient.shape[1] == few.shape[1]:
        return gradient
    documents, _, length, width = gradient.shape
    return gradient.reshape(documents, few.shape[1], -1, length, width).sum(2)
