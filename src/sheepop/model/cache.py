"""The interface of a key-value cache, with which the network computes only the new tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from sheepop.model.attention.kernel import Attending, AttentionKind, Score

AttendLatents = Callable[[Attending, Tensor, Tensor, Tensor], Tensor]
"""Attends with a kernel from queries (B, H, T, C) to shared keys (B, 1, S, R) and latents (B, 1, S, L)."""
Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""Maps states (B, ...) and inputs (B, T, ...) to outputs (B, T, ...) and the states after the last token."""


class Cache(Protocol):
    """A key-value cache as the network uses it. Memory layout and kernel are up to the implementation.

    In each pass the network calls `begin` once, `prepare` once for each kind of layer, and `attend` in every layer. A
    cache with `has_documents` accepts rows of several documents, given by `document_ids` (B, T).
    """

    has_documents: ClassVar[bool] = False

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """Returns the positions (B, T) of the new tokens, and the length of the longest sequence with them.

        Raises `ValueError` if the cache does not expect B rows of T tokens.
        """

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """Returns the `count` entries before `new` in each row (B, count, ...) of the input called `place`.

        `new` (B, T, ...) are the entries of this pass; entries before a row begins are 0. A place must be read in every
        pass or in none.
        """

    def recur(self, place: str, recurrence: Recurrence, start: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the outputs (B, T, ...) of a recurrence over the new tokens, which continues the state at `place`.

        `inputs` (B, T, ...) are those of this pass; the state of a row begins with `start` (...).
        """

    def prepare(self, window: int | None, kind: Callable[[], AttentionKind]) -> Attending:
        """Prepares the kernel that layers with this window share in this pass, for new tokens over all tokens so far.

        A cache that has prepared such a pass before need not ask for their `kind`.
        """

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores a layer's new keys and values, then attends over all stored ones (B, H, T, C)."""

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values (B, K, S, C) of the encoder's states: computed by `project` once, then
        cached."""


@runtime_checkable
class LatentCache(Cache, Protocol):
    """A cache that stores the latents of latent attention, instead of the keys and values of its heads."""

    def attend_latents(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_B1TR: Tensor, c_B1TL: Tensor, attend: AttendLatents
    ) -> Tensor:
        """Stores a layer's new shared keys and latents, then attends by `attend` to all stored ones (B, H, T, C)."""


def shifted(new: Tensor, most: int, document_ids: Tensor | None, cache: Cache | None, place: str) -> list[Tensor]:
    """Returns `new` (B, T, ...) shifted by 1, 2, ..., `most` positions, with 0 from before a row or document begins.

    `document_ids` (B, T) number the documents of a row; `cache` provides the entries of `place` before `new`.
    """
    num_tokens = new.shape[1]
    held = new.new_zeros(len(new), most, *new.shape[2:]) if cache is None else cache.preceding(place, new, most)
    joined, found = torch.cat((held, new), dim=1), []
    documents = None
    if document_ids is not None:
        documents = functional.pad(document_ids, (most, 0), value=-1)
        if cache is not None:
            documents[:, :most] = cache.preceding("documents", document_ids, most)
    for back in range(1, most + 1):
        earlier = joined[:, most - back : most - back + num_tokens]
        if document_ids is not None and documents is not None:
            same = document_ids == documents[:, most - back : most - back + num_tokens]
            earlier = earlier * same.view(*same.shape, *(1 for _ in new.shape[2:]))
        found.append(earlier)
    return found
