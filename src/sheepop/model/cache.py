"""What the network asks of a store of keys and values, so that a new token runs it on one position only."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from sheepop.model.attention.kernel import Attending, AttentionKind, Score


class Cache(Protocol):
    """What the network needs of a key-value store. How it lies in memory, and by which kernel, is the store's affair.

    It knows which tokens come in a pass. The network begins with `begin`, asks `prepare` once for each kind of layer,
    and lets every layer `attend`. One that `has_documents` takes rows of several, whose numbers (B, T) it is given with
    the tokens.
    """

    has_documents: ClassVar[bool] = False

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """The positions (B, T) of the tokens that come, and how many tokens the longest text will have then.

        Raises `ValueError` where these are not B rows of T tokens.
        """

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """The last `count` entries of every row (B, count, ...) at a place of the network, 0 where there are none.

        `new` (B, T, ...) come next. Asked at each place in every pass or in none.
        """

    def prepare(self, kind: AttentionKind) -> Attending:
        """Makes ready what the layers of a kind share in this pass: the new tokens see themselves and what is held."""

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores new keys and values of a layer and attends over all that it holds then (B, H, T, C)."""

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, C) of an encoder's states in one layer: made by `project` once, then kept."""


def shifted(new: Tensor, most: int, document_ids: Tensor | None, cache: Cache | None, place: str) -> list[Tensor]:
    """What stands 1, 2, ... `most` places before each entry of `new` (B, T, ...), 0 where a row or document begins.

    `document_ids` (B, T) number the documents of a row; `cache` knows what came before `new` at this place.
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
