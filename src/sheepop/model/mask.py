"""Which keys a query may see, in the form that the attention at hand reads.

Whatever is asked for, documents in a row, left padding, windows, distances, comes down to one rule for a query at place
q and a key at place k of a row: ``first(q) <= k <= q``. Attention that is not causal, an encoder's, has no upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from sheepop.core.errors import ConfigError
from sheepop.model.block_attention import block_mask, has_block_kernel
from sheepop.model.distances import allowed_by_distance, distance_bias
from sheepop.model.documents import Segments, number_documents
from sheepop.model.window_attention import Strips


@dataclass(frozen=True)
class AttentionKind:
    """What the layers that share a mask have in common: what they see, and what their kernel has to be able to do.

    A query sees `window` keys, itself included (all when None); `slopes` (H,) times the distance to a key is taken off
    its score. `stepwise` asks for attention computed in steps, with scores and weights that can be seen. `cached` says
    that a cache takes part: texts are then of every length, and for each a kernel for blocks would be compiled.
    """

    window: int | None = None
    slopes: Tensor | None = None
    causal: bool = True
    head_dim: int = 0
    value_dim: int = 0
    dropout: float = 0.0
    soft_cap: bool = False
    sinks: bool = False
    backend: str = "auto"
    stepwise: bool = False
    compiled: bool = False
    cached: bool = False

    @property
    def eager(self) -> bool:
        """Whether scores and weights are tensors of their own."""
        return self.stepwise or self.backend == "eager" or self.soft_cap

    @property
    def plain(self) -> bool:
        """Whether being causal and within one's document says all about what is seen."""
        return self.causal and self.window is None and self.slopes is None


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see. With no part it is the plain lower triangle over the last T of S keys.

    `allowed` is boolean, (B, 1, T, S) or broadcastable to it; `bias` (B, H, T, S) is added to the scores, -inf where a
    key is not allowed. `documents` says the same of documents in a row, or of a window, without as many entries: cut
    into segments or strips, as blocks (with the `slopes` (H,) of distances), or as running numbers (B, T).
    `attention_mask` is the only place that builds one.
    """

    allowed: Tensor | None = None
    bias: Tensor | None = None
    documents: Segments | BlockMask | Strips | Tensor | None = None
    slopes: Tensor | None = None
    eager: bool = False
    causal: bool = True

    @property
    def added(self) -> Tensor | None:
        """What fused attention takes: `bias` or `allowed`."""
        return self.allowed if self.bias is None else self.bias


PLAIN = AttentionKind()


def attention_mask(
    num_queries: int,
    num_keys: int,
    *,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    kind: AttentionKind = PLAIN,
) -> AttentionMask:
    """The mask for T queries that are the last T of S keys.

    `document_ids` (B, S) keeps attention within a run of equal ids (S = T then); `key_mask` (B, S) is False at
    padding. A padded query sees itself, which keeps its softmax finite; nothing reads its result. Raises
    `ValueError` when a shape does not fit, and `ConfigError` for blocks where they cannot be computed.
    """
    for name, given in (("document_ids", document_ids), ("key_mask", key_mask)):
        if given is not None and (given.ndim != 2 or given.shape[1] != num_keys):
            raise ValueError(f"{name} has shape {tuple(given.shape)}; a row for each sequence of {num_keys} is needed")
    if document_ids is not None and num_queries != num_keys:
        raise ValueError(f"document_ids need every position as a query; got {num_queries} of {num_keys}")
    if kind.window is not None and kind.window >= num_keys:
        kind = replace(kind, window=None)
    documents = None if document_ids is None else number_documents(document_ids)
    if not kind.causal and kind.window is None and kind.slopes is None and documents is None:
        return cross_attention_mask(key_mask, kind)
    whole_rows = key_mask is None and num_queries == num_keys
    if _takes_blocks(kind, documents, torch.device(device)) and whole_rows:
        return AttentionMask(documents=block_mask(num_keys, documents, kind.window, device), slopes=kind.slopes)
    if documents is None and key_mask is None and kind.plain and num_queries in (1, num_keys):
        return AttentionMask(eager=kind.eager)
    fused = key_mask is None and kind.causal and not kind.eager and not kind.sinks
    if fused and documents is None and whole_rows and kind.slopes is None and kind.window is not None:
        strips = Strips.of(num_keys, kind.window, device)
        if strips is not None:
            return AttentionMask(documents=strips)
    if fused and documents is not None:
        if not (kind.compiled or torch.compiler.is_compiling()):
            return AttentionMask(documents=Segments.of(documents, kind.window, kind.slopes))
        # Where documents begin differs from batch to batch; compiled code would be made anew for each.
        same_width = kind.head_dim == kind.value_dim
        if kind.plain and kind.dropout == 0 and documents.device.type == "cpu" and same_width:
            return AttentionMask(documents=documents)
    return _dense_mask(num_queries, num_keys, documents, key_mask, torch.device(device), kind)


def cross_attention_mask(key_mask: Tensor | None, kind: AttentionKind = PLAIN) -> AttentionMask:
    """Every query sees every key, apart from padding: `key_mask` (B, S) is False there, and somewhere True."""
    allowed = None if key_mask is None else key_mask[:, None, None, :]
    return AttentionMask(allowed=allowed, eager=kind.eager, causal=False)


def require_backend(backend: str, device: torch.device, narrowest: int) -> None:
    """Raises `ConfigError` when `backend` cannot compute heads of at least `narrowest` columns on `device`."""
    if backend == "flex" and not has_block_kernel(device, narrowest):
        raise ConfigError(
            "model.attention_backend: flex needs an NVIDIA GPU from 2020 on, with Triton and a C compiler, and heads "
            f"of at least 16 columns; this network runs on {device.type} with {narrowest}. Set it to auto."
        )


def _dense_mask(
    num_queries: int,
    num_keys: int,
    documents: Tensor | None,
    key_mask: Tensor | None,
    device: torch.device,
    kind: AttentionKind,
) -> AttentionMask:
    allowed = allowed_by_distance(num_queries, num_keys, window=kind.window, causal=kind.causal, device=device)
    allowed = allowed[None, None]
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if key_mask is not None:
        allowed = (allowed & key_mask[:, None, None, :]) | allowed_by_distance(
            num_queries, num_keys, window=1, device=device
        )
    if kind.slopes is None:
        return AttentionMask(allowed, eager=kind.eager, causal=kind.causal)
    bias = distance_bias(kind.slopes, num_queries, num_keys, device)[None].masked_fill(~allowed, -torch.inf)
    return AttentionMask(bias=bias, eager=kind.eager, causal=kind.causal)


def _takes_blocks(kind: AttentionKind, documents: Tensor | None, device: torch.device) -> bool:
    """Whether a pass over whole rows is computed in blocks: where it saves work, or where it is asked for."""
    narrowest = min(kind.head_dim, kind.value_dim)
    require_backend(kind.backend, device, narrowest)
    able = has_block_kernel(device, narrowest)
    pays = documents is not None or kind.window is not None or kind.soft_cap
    chosen = kind.backend == "flex" or (kind.backend == "auto" and pays and not kind.cached)
    return able and chosen and kind.causal and kind.dropout == 0 and not kind.stepwise
