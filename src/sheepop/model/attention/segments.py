"""Attention within the documents that share a row, without a mask of T times T entries.

The rows are cut into their documents, and documents of like length attend together. In a network that is compiled for a
CPU this is one operator of PyTorch: where documents begin differs from batch to batch, code that was compiled for one
batch would not fit the next, and the compiler does not look into an operator.
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

# Documents are padded to a multiple of this many places, so that those of like length share one call.
PADDING_STEP = 16


class Segments:
    """Causal attention of whole rows within documents."""

    name = "segments"

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Rows of one document each, and in compiled networks what the operator or the compiler cannot do."""
        absent = missing(self.name, kind, sight)
        if absent is not None:
            return absent
        if sight.documents is None:
            return "is for documents that share a row"
        if not _is_compiled(kind):
            return None
        if kind.device.type == "cuda":
            return "cannot be prepared inside compiled code" if torch.compiler.is_compiling() else None
        if kind.device.type != "cpu":
            return f"is not compiled for {kind.device.type}"
        if kind.dropout > 0 or kind.slopes is not None or sight.reach is not None:
            return "has no dropout, no windows and no distances in a network compiled for a CPU"
        return None if kind.head_dim == kind.value_dim else "is compiled only for values as wide as keys"

    def prepare(self, kind: AttentionKind, sight: Sight) -> SegmentsAttention | AsideAttention | OperatorAttention:
        """Cuts the rows, or leaves that to the operator."""
        assert sight.documents is not None
        if kind.device.type == "cpu" and _is_compiled(kind):
            return OperatorAttention(sight.documents)
        cut = Cut.of(sight.documents)
        masks = {size: _document_mask(size, kind, sight) for _, size in cut.groups}
        attending = SegmentsAttention(cut, tuple(masks[size] for _, size in cut.groups))
        return AsideAttention(attending, _beside_compiled_code()) if kind.compiled else attending


def _is_compiled(kind: AttentionKind) -> bool:
    return kind.compiled or torch.compiler.is_compiling()


def _document_mask(length: int, kind: AttentionKind, sight: Sight) -> Tensor | None:
    """The mask of one document: None for the plain triangle, (T, T) booleans, or (H, T, T) numbers to be added."""
    alone = replace(sight, num_queries=length, num_keys=length, documents=None)
    if alone.is_triangle and kind.slopes is None:
        return None
    added = alone.added(kind.slopes)
    if added is None:
        return None
    if added.dtype == torch.bool:
        return added[0, 0]
    # The memory-efficient kernel of GPUs asks for four dimensions.
    return added if added.device.type == "cuda" else added[0]


@dataclass(frozen=True)
class Cut:
    """The documents of a batch in groups of one padded length, as indices into its B T places.

    `gather` lists the places group by group, each document followed by its padding, which repeats the document's
    last place; causal attention keeps padding behind a document from it. `scatter` (B T,) says where in that list
    each place stands, and `groups` holds the number of documents and the padded length of every group.
    """

    gather: Tensor
    scatter: Tensor
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, documents_BT: Tensor) -> Cut:
        """The cut of rows whose documents are numbered by `number_documents`."""
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
        device = documents_BT.device
        return cls(
            torch.from_numpy(gather).to(device),
            torch.from_numpy(scatter).to(device),
            tuple(zip(counts.tolist(), sizes.tolist(), strict=True)),
        )

    def parts(self, heads_BHTC: Tensor) -> list[Tensor]:
        """The heads of every group's documents, (documents, heads, padded length, C)."""
        batch, heads, length, width = heads_BHTC.shape
        places = heads_BHTC.transpose(1, 2).reshape(batch * length, heads, width).index_select(0, self.gather)
        return self.split(places)

    def split(self, places: Tensor) -> list[Tensor]:
        """What was gathered (places, heads, ...) by group, (documents, heads, padded length, ...)."""
        parts = torch.split(places, [count * padded for count, padded in self.groups])
        return [
            part.view(*group, *part.shape[1:]).transpose(1, 2) for part, group in zip(parts, self.groups, strict=True)
        ]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split` without padding, (B T, heads, ...)."""
        return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).index_select(0, self.scatter)


@dataclass(frozen=True)
class SegmentsAttention:
    """`masks` are those of a document of each group, None for the plain triangle."""

    cut: Cut
    masks: tuple[Tensor | None, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where the documents are, and their masks."""
        return (self.cut.gather, self.cut.scatter, *(mask for mask in self.masks if mask is not None))

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """Causal attention of every document to itself (B, H, T, C), the documents of a group in one call."""
        score.check("segments")
        batch, heads, length, _ = q_BHTC.shape
        outputs = [
            scaled_dot_product(q, k, v, mask=mask, is_causal=mask is None, dropout=score.dropout, scale=score.scale)
            for mask, q, k, v in zip(self.masks, *map(self.cut.parts, (q_BHTC, k_BKTC, v_BKTC)), strict=True)
        ]
        return self.cut.joined(outputs).view(batch, length, heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class AsideAttention:
    """`segments` in a compiled network, which goes round it by `attend_aside`: the groups of every batch are others."""

    segments: SegmentsAttention
    attend_aside: Callable[..., Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of `segments`."""
        return self.segments.tensors

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C)."""
        return self.attend_aside(self.segments, q_BHTC, k_BKTC, v_BKTC, score)


@cache
def _beside_compiled_code() -> Callable[..., Tensor]:
    """One function for all passes, and none before it is needed: as a decorator it would load the compiler at once."""
    aside: Callable[..., Tensor] = torch.compiler.disable(SegmentsAttention.attend)  # type: ignore[no-untyped-call]
    return aside


@dataclass(frozen=True)
class OperatorAttention:
    """`document_attention` among documents of these running numbers (B, T)."""

    documents: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numbers of the documents."""
        return (self.documents,)

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C)."""
        score.check("segments")
        if score.dropout > 0:
            raise ValueError("attention by segments has no dropout in compiled code; choose_kernel was not told of it")
        if score.scale is not None:
            # The operator divides by sqrt(C).
            q_BHTC = q_BHTC * (score.scale * q_BHTC.shape[-1] ** 0.5)
        return document_attention(q_BHTC, k_BKTC, v_BKTC, self.documents)[0].transpose(1, 2)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("sheepop::document_attention", mutates_args=(), device_types="cpu")
def document_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within documents (B, T, H, C), and the logarithms of the softmax's sums (B T, H).

    `documents_BT` are running numbers. The result equals that of `SegmentsAttention` without dropout.
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
    """Gradients of queries, keys and values, each (B, T, heads, C)."""
    cut = Cut.of(documents_BT)
    # The gradient of a padded place is zero, so that its query, a copy of another, adds nothing to any key.
    gradient = gradient_BTHC.new_zeros(len(cut.gather), *gradient_BTHC.shape[2:])
    gradient.index_copy_(0, cut.scatter, gradient_BTHC.flatten(0, 1))
    places = (out_BTHC.flatten(0, 1).index_select(0, cut.gather), log_sums.index_select(0, cut.gather))
    gradients: tuple[list[Tensor], ...] = ([], [], [])
    for q, k, v, gradient_out, out, sums in zip(
        *map(cut.parts, (q_BHTC, k_BKTC, v_BKTC)), *map(cut.split, (gradient, *places)), strict=True
    ):
        heads = q.shape[1]
        repeated = (repeat_heads(part, heads) for part in (k, v))
        found = _backward(gradient_out, q, *repeated, out, sums, 0.0, True)
        for of_heads, kept, part in zip((q, k, v), gradients, found, strict=True):
            kept.append(_sum_repeated(part, of_heads))
    gradient_q, gradient_k, gradient_v = (
        cut.joined(parts).view(*documents_BT.shape, *parts[0].shape[1::2]) for parts in gradients
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


def _sum_repeated(gradient: Tensor, few: Tensor) -> Tensor:
    """The gradient of heads that `repeat_heads` repeated."""
    if gradient.shape[1] == few.shape[1]:
        return gradient
    documents, _, length, width = gradient.shape
    return gradient.reshape(documents, few.shape[1], -1, length, width).sum(2)
