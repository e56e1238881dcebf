"""Embeddings of hashed n-grams: vectors for the last tokens together, beside the embedding of the last one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sheepop.model.cache import Cache, shifted
from sheepop.model.config import NgramConfig

# Odd, so that no bit of a token is lost: the odd number at the golden ratio's fractional part times 2^62.
_MULTIPLIER = 0x278DDE6E5FD29F05
_SHIFT = 29


class NgramEmbedding(nn.Module):
    """One table of vectors for each order n; the rows of a token are found by hashing it with the n - 1 before it.

    The tables lie behind one another in `table` (N * rows, D) for N orders, and begin at 0: a row means nothing until
    its n-gram was seen. Where a document begins its n-grams begin too.
    """

    def __init__(self, config: NgramConfig, d_model: int) -> None:
        super().__init__()
        self.orders, self.rows = config.orders, config.rows
        self.is_sparse = True
        self.table = nn.Parameter(torch.empty(len(config.orders) * config.rows, d_model))

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The sum of the vectors of every token (B, T, D).

        While it `is_sparse` the gradient is, of the rows that were looked up.

        `document_ids` (B, T) number the documents of a row; `cache` knows the tokens before `input_ids` (B, T).
        """
        sparse = self.is_sparse and self.table.requires_grad and torch.is_grad_enabled()
        places_NBT = self.places(input_ids, document_ids, cache)
        return functional.embedding(places_NBT, self.table, sparse=sparse).sum(0)

    def places(self, input_ids: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The row of `table` for every order and token (N, B, T)."""
        tokens = input_ids + 1  # 0 is none: before a text begins
        hashed, places = tokens, []
        for earlier in shifted(tokens, max(self.orders) - 1, document_ids, cache, "ngrams"):
            # Overflow wraps around, alike on every device.
            hashed = hashed * _MULTIPLIER + earlier
            hashed = hashed ^ (hashed >> _SHIFT)
            places.append(hashed)
        tables = enumerate(self.orders)
        return torch.stack([places[order - 2] % self.rows + table * self.rows for table, order in tables])
