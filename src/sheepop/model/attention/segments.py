"""Attention within the documents that share a row, without a mask of T times T entries.

Rows are cut into documents, and documents of similar length attend together. In a network compiled for a CPU this is a
custom PyTorch operator, which the compiler does not trace: documents begin elsewhere in every batch, and code compiled
for one batch would not fit the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sheepop.model.attention.fused import repeat_heads, scaled_dot_product
from sheepop.model.attention.kernel import PLAIN, AttentionKind, Score, missing
from sheepop.model.attention.sight import Sight

# Documents are padded to a multiple of this length, so that documents of similar length share one call.
PADDING_STEP = 16


class Segments:
    """Causal attention of whole rows within documents."""

    name = "segments"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Supports only packed documents, and in compiled networks only what the operator or the compiler can do."""
        absent = missing(self.name, kind, sight)
        if absent is not None:
            return absent
        if sight.documents is None:
            return "is for packed documents"
        if not _is_compiled(kind):
            return None
        if kind.device.type == "cuda":
            return "cannot be prepared inside compiled code" if torch.compiler.is_compiling() else None
        if kind.device.type != "cpu":
            return f"is not compiled for {kind.device.type}"
        if kind.dropout > 0 or kind.slopes is not None or sight.reach is not None:
            return "has no dropout, no windows and no distances in a network compiled for a CPU"
        return None if kind.head_dim == kind.value_dim else "is compiled only for values as wide as keys"

    def prepare(self, kind: AttentionKind, sight: Sight) -> SegmentsAttention | UncompiledAttention | OperatorAttention:
        """Cuts the rows into documents, or leaves that to the operator."""
        assert sight.documents is not None
        if kind.device.type == "cpu" and _is_compiled(kind):
            return OperatorAttention(sight.documents)
        cut = Cut.of(sight.documents)
        masks = {size: _document_mask(size, kind, sight) for _, size in cut.groups}
        attending = SegmentsAttention(cut, tuple(masks[size] for _, size in cut.groups))
        return UncompiledAttention(attending, _uncompiled_attend()) if kind.compiled else attending


def _is_compiled(kind: AttentionKind) -> bool:
    return kind.compiled or torch.compiler.is_compiling()


def _document_mask(length: int, kind: AttentionKind, sight: Sight) -> Tensor | None:
    """Returns the mask of a document: None for the plain triangle, (T, T) booleans, or (H, T, T) numbers to add."""
    alone = replace(sight, num_queries=length, num_keys=length, documents=None)
    if alone.is_triangle and kind.slopes is None:
        return None
    added = alone.added(kind.slopes)
    if added is None:
        return None
    if added.dtype == torch.bool:
        return added[0, 0]
    # The memory-efficient GPU kernel requires four dimensions.
    return added if added.device.type == "cuda" else added[0]


@dataclass(frozen=True)
class Cut:
    """The documents of a batch in groups of equal padded length, as indices into its B T positions.

    `gather` lists the positions group by group, each document followed by padding, which repeats its last position and
    which causal attention hides from it. `scatter` (B T,) is the index of each position in that list. `groups` has the
    number of documents and the padded length of each group.
    """

    gather: Tensor
    scatter: Tensor
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, documents_BT: Tensor) -> Cut:
        """Cuts rows by document numbers from `number_documents`."""
        numbers = documents_BT.cpu().numpy()
        begins = np.ones(numbers.shape, dtype=bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=numbers.size)
        padded = np.minimum(-(-lengths // PADDING_STEP) * PADDING_STEP, numbers.shape[1])
        order = np.argsort(padded, kind="stable")
        starts, lengths, padded = starts[order], lengths[order], padded[order]
        offsets = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
        lasts = np.repeat(lengths - 1, padded)
        gather = np.repeat(starts, padded) + np.minimum(offsets, lasts)
        scatter = np.empty(numbers.size, dtype=np.int64)
        scatter[gather[offsets <= lasts]] = np.flatnonzero(offsets <= lasts)
        sizes, counts = np.unique(padded, return_counts=True)
        device, groups = documents_BT.device, tuple(zip(counts.tolist(), sizes.tolist(), strict=True))
        return cls(torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device), groups)

    def parts(self, heads_BHTC: Tensor) -> list[Tensor]:
        """Returns the heads of each group's documents, (documents, heads, padded length, C)."""
        batch, heads, length, width = heads_BHTC.shape
        places = heads_BHTC.transpose(1, 2).reshape(batch * length, heads, width)
        return self.split(places.index_select(0, self.gather))

    def split(self, places: Tensor) -> list[Tensor]:
        """Splits gathered positions (places, heads, ...) into groups (documents, heads, padded length, ...)."""
        parts = torch.split(places, [count * padded for count, padded in self.groups])
        return [
            part.view(*group, *part.shape[1:]).transpose(1, 2) for part, group in zip(parts, self.groups, strict=True)
        ]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Reverses `split` and `gather`, and drops the padding, (B T, heads, ...)."""
        return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).index_select(0, self.scatter)


@dataclass(frozen=True)
class SegmentsAttention:
    """`masks` has one mask for the documents of each group, None for the plain triangle."""

    cut: Cut
    masks: tuple[Tensor | None, ...]

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Computes causal attention within each document (B, H, T, C), with one call for each group."""
        score.check("segments")
        batch, heads, length, _ = q_BHTC.shape
        outputs = [
            scaled_dot_product(q, k, v, mask=mask, is_causal=mask is None, dropout=score.dropout, scale=score.scale)
            for mask, q, k, v in zip(self.masks, *map(self.cut.parts, (q_BHTC, k_BKTC, v_BKTC)), strict=True)
        ]
        return self.cut.joined(outputs).view(batch, length, heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class UncompiledAttention:
    """Runs `segments` uncompiled inside a compiled network, because the groups change in every batch."""

    segments: SegmentsAttention
    uncompiled_attend: Callable[..., Tensor]

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C)."""
        return self.uncompiled_attend(self.segments, q_BHTC, k_BKTC, v_BKTC, score)


@cache
def _uncompiled_attend() -> Callable[..., Tensor]:
    """Returns one function for all passes, made on first use, since as a decorator it would load the compiler early."""
    return torch.compiler.disable(SegmentsAttention.attend)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class OperatorAttention:
    """Calls `document_attention` with these document numbers (B, T)."""

    documents: Tensor

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns attention (B, H, T, C)."""
        score.check("segments")
        if score.dropout > 0:
            raise ValueError("segments attention has no dropout in compiled code; choose_kernel did not know of it")
        if score.scale is not None:
            # The operator divides by sqrt(C).
            q_BHTC = q_BHTC * (score.scale * q_BHTC.shape[-1] ** 0.5)
        return document_attention(q_BHTC, k_BKTC, v_BKTC, self.documents)[0].transpose(1, 2)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("sheepop::document_attention", mutates_args=(), device_types="cpu")
def document_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns causal attention within documents (B, T, H, C), and the logarithms of the softmax's sums (B T, H).

    `documents_BT` are numbers from `number_documents`. The result equals that of `SegmentsAttention` without dropout.
    """
    cut = Cut.of(documents_BT)
    outputs, sums = [], []
    for q, k, v in zip(*map(cut.parts, (q_BHTC, k_BKTC, v_BKTC)), strict=True):
        heads = q.shape[1]
        out, log_sums = _forward(q, repeat_heads(k, heads), repeat_heads(v, heads), is_causal=True)
        outputs.append(out)
        sums.append(log_sums)
    batch, heads, length, width = q_BHTC.shape
    return cut.joined(outputs).view(batch, length, heads, width), cut.joined(sums)


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
    """Returns the gradients of queries, keys and values, each (B, T, heads, C)."""
    cut = Cut.of(documents_BT)
    # Padding has zero gradient, so that its query, a copy of another, adds nothing to the gradient of any key.
    gradient = gradient_BTHC.new_zeros(len(cut.gather), *gradient_BTHC.shape[2:])
    gradient.index_copy_(0, cut.scatter, gradient_BTHC.flatten(0, 1))
    places = (out_BTHC.flatten(0, 1).index_select(0, cut.gather), log_sums.index_select(0, cut.gather))
    gradients: tuple[list[Tensor], ...] = ([], [], [])
    for q, k, v, gradient_out, out, sums in zip(
        *map(cut.parts, (q_BHTC, k_BKTC, v_BKTC)), *map(cut.split, (gradient, *places)), strict=True
    ):
        repeated = (repeat_heads(part, q.shape[1]) for part in (k, v))
        found = _backward(gradient_out, q, *repeated, out, sums, 0.0, True)
        for of_heads, kept, part in zip((q, k, v), gradients, found, strict=True):
            kept.append(_sum_repeated(part, of_heads))
    gradient_q, gradient_k, gradient_v = (
        cut.joined(parts).view(*documents_BT.shape, *parts[0].shape[1::2]) for parts in gradients
    )
    return gradient_q, gradient_k, gradient_v


@_document_attention_backward.register_fake
def _backward_shapes(gradient_BTHC: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradient_q, gradient_k, gradient_v = (heads.new_empty(heads.transpose(1, 2).shape) for heads in inputs[:3])
    return gradient_q, gradient_k, gradient_v


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, gradient_BTHC: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _document_attention_backward(gradient_BTHC.contiguous(), *ctx.saved_tensors)
    return (*(gradient.transpose(1, 2) for gradient in found), None)


document_attention.register_autograd(_gradients, setup_context=_keep)


def _sum_repeated(gradient: Tensor, few: Tensor) -> Tensor:
    """Sums the gradient over the copies that `repeat_heads` made."""
    if gradient.shape[1] == few.shape[1]:
        return gradient
    documents, _, length, width = gradient.shape
    return gradient.reshape(documents, few.shape[1], -1, length, width).sum(2)
