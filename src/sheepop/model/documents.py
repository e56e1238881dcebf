"""Attention within the documents that share a row, without a mask of T times T entries.

A document is a run of equal ids in a row. The rows are cut into their documents, and documents of like length attend
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.causal_attention import attend_by_products, takes_products
from sheepop.model.distances import allowed_by_distance, distance_bias

# Documents are padded to a multiple of this many places, so that those of like length share one call.
PADDING_STEP = 16


def number_documents(document_ids: Tensor) -> Tensor:
    """The running number (B, T), int64 from 0, of the document that each place of a row belongs to."""
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(begins.long(), (1, 0)).cumsum(1)


@dataclass(frozen=True)
class Segments:
    """The documents of a batch in groups of one padded length, as indices into its B T places.

    `gather` lists the places group by group, each document followed by its padding, which repeats the document's
    last place; causal attention keeps padding behind a document from it. `scatter` (B T,) says where in that list
    each place stands, and `groups` holds the number of documents and the padded length of every group. `masks`
    are those of a document of each length, None for the plain triangle. `numbers` (B, T) are those of the documents.
    """

    numbers: Tensor
    gather: Tensor
    scatter: Tensor
    groups: tuple[tuple[int, int], ...]
    masks: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, documents_BT: Tensor, window: int | None = None, slopes_H: Tensor | None = None) -> Segments:
        """The segments of rows whose documents are numbered by `number_documents`; see `AttentionKind` for the rest."""
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
            documents_BT,
            torch.from_numpy(gather).to(device),
            torch.from_numpy(scatter).to(device),
            tuple(zip(counts.tolist(), sizes.tolist(), strict=True)),
            tuple(_triangle(size, window, slopes_H, device) for size in sizes.tolist()),
        )


def _triangle(length: int, window: int | None, slopes_H: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask of one document: None for the plain triangle, (T, T) booleans, or (H, T, T) numbers to be added."""
    if slopes_H is None and (window is None or window >= length):
        return None
    allowed = allowed_by_distance(length, length, window=window, device=device)
    if slopes_H is None:
        return allowed
    return distance_bias(slopes_H, length, length, device).masked_fill(~allowed, -torch.inf)


def attend_in_segments(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, segments: Segments, dropout: float, scale: float | None = None
) -> Tensor:
    """Causal attention of every document to itself (B, H, T, C), the documents of a group in one call."""
    if takes_products(q_BHTC, dropout) and all(mask is None for mask in segments.masks):
        return attend_by_products(q_BHTC, k_BKTC, v_BKTC, scale, segments.numbers)
    batch, heads, length, _ = q_BHTC.shape
    sizes = [count * padded for count, padded in segments.groups]
    gathered = (
        torch.split(
            heads_BHTC.transpose(1, 2)
            .reshape(batch * length, *heads_BHTC.shape[1::2])
            .index_select(0, segments.gather),
            sizes,
        )
        for heads_BHTC in (q_BHTC, k_BKTC, v_BKTC)
    )
    outputs = []
    for group, mask, *places in zip(segments.groups, segments.masks, *gathered, strict=True):
        q, k, v = (part.unflatten(0, group).transpose(1, 2) for part in places)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype),
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=heads != k_BKTC.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outputs).index_select(0, segments.scatter)
    return out.view(batch, length, heads, -1).transpose(1, 2)
