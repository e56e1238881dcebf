"""The attention mask as a rule: which keys a query may see.

Packed documents, windows and cached rows of different length all follow one rule for a query at position q and a key at
position k of a row: ``first(q) <= k <= q``. Bidirectional attention, in an encoder or to an encoder's states, sees
every key that is not padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CPU = torch.device("cpu")


def number_documents(document_ids: Tensor) -> Tensor:
    """Numbers the documents of each row from 0 (B, T), int64; a document is a run of equal ids."""
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(begins.long(), (1, 0)).cumsum(1)


@dataclass(frozen=True)
class Sight:
    """Which of S keys each of T queries may see.

    The first query of row b is at position `starts[b]` (B,), or at S - T in every row if None. A causal query sees the
    keys up to its own position: at most `window` of them, its own included, and only those of its own document, by the
    numbers (B, S) in `documents`. If `causal` is False it sees every key except where `key_mask` (B, S) is False.

    Raises `ValueError` for fields that do not fit each other.
    """

    num_queries: int
    num_keys: int
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    starts: Tensor | None = None
    key_mask: Tensor | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        for name, given in (("document_ids", self.documents), ("key_mask", self.key_mask)):
            if given is not None and (given.ndim != 2 or given.shape[1] != self.num_keys):
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}; it needs one row of {self.num_keys} for each sequence"
                )
        if self.documents is not None and not self.is_whole:
            raise ValueError(f"document_ids need every position as a query; got {self.num_queries} of {self.num_keys}")
        if self.causal and self.key_mask is not None:
            raise ValueError("a key_mask is for bidirectional attention; causal rows have their padding at the end")
        if not self.causal and not (self.window is None and self.documents is None and self.starts is None):
            raise ValueError("windows, documents and rows of different length are for causal attention")

    @property
    def reach(self) -> int | None:
        """The window, or None if it hides no key of the row."""
        return None if self.window is None or self.window >= self.num_keys else self.window

    @property
    def is_whole(self) -> bool:
        """Whether every position is a query."""
        return self.num_queries == self.num_keys and self.starts is None

    @property
    def is_triangle(self) -> bool:
        """Whether the mask is the plain causal triangle over whole rows."""
        return self.causal and self.is_whole and self.reach is None and self.documents is None

    @property
    def is_everything(self) -> bool:
        """Whether every query sees every key: bidirectional without padding, or a single query at the last position."""
        if not self.causal:
            return self.key_mask is None
        newest = self.num_queries == 1 and self.starts is None
        return newest and self.reach is None and self.documents is None

    @property
    def features(self) -> frozenset[str]:
        """The entries of `KERNEL_FEATURES` that a kernel needs for this mask."""
        required = {
            "documents": self.documents is not None,
            "windows": self.reach is not None,
            "bidirectional attention": not self.causal,
            "partial rows": self.causal and not self.is_whole,
        }
        return frozenset(feature for feature, needed in required.items() if needed)

    def places(self) -> Tensor:
        """Returns the positions of the queries, (T,), or (B, T) if rows differ."""
        offsets = torch.arange(self.num_queries, device=self.device)
        if self.starts is None:
            return offsets + (self.num_keys - self.num_queries)
        return self.starts[:, None] + offsets

    def distances(self) -> Tensor:
        """Returns each query's position minus each key's, (T, S) or (B, T, S)."""
        return self.places()[..., None] - torch.arange(self.num_keys, device=self.device)

    def first_keys(self) -> Tensor:
        """Returns the first key that each query sees (B, T), or (1, T) if rows do not differ."""
        places = self.places()
        firsts = torch.zeros_like(places).expand(1, -1) if places.ndim == 1 else torch.zeros_like(places)
        if self.documents is not None:
            begins = F.pad(self.documents[:, 1:] != self.documents[:, :-1], (1, 0), value=True)
            firsts = torch.where(begins, places, 0).cummax(1).values
        return firsts if self.reach is None else firsts.maximum(places - self.reach + 1)

    def allowed(self) -> Tensor:
        """Returns booleans, True where a query sees a key, that broadcast to (B, 1, T, S)."""
        if not self.causal:
            if self.key_mask is None:
                return torch.ones(1, 1, 1, self.num_keys, dtype=torch.bool, device=self.device)
            return self.key_mask[:, None, None, :]
        distances = self.distances()
        allowed = distances >= 0
        if self.reach is not None:
            allowed = allowed & (distances < self.reach)
        allowed = allowed[None, None] if allowed.ndim == 2 else allowed[:, None]
        if self.documents is not None:
            allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        return allowed

    def added(self, slopes_H: Tensor | None) -> Tensor | None:
        """Returns the mask: booleans as from `allowed`, or with ALiBi `slopes_H` numbers (B, H, T, S) to add to scores.

        ALiBi adds ``-slope |q - k|`` (Press et al. 2022). Returns None if every query sees every key without a bias.
        """
        if slopes_H is None:
            return None if self.is_everything else self.allowed()
        distances = self.distances().abs()
        distances = distances[:, None] if distances.ndim == 3 else distances
        bias = -slopes_H.to(self.device)[:, None, None] * distances
        bias = bias if bias.ndim == 4 else bias[None]
        return bias if self.is_everything else bias.masked_fill(~self.allowed(), -torch.inf)
