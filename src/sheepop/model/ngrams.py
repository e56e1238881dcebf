"""Embeddings of hashed n-grams, which are added to the embedding of the n-gram's last token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sheepop.model.cache import Cache, shifted
from sheepop.model.sections import NgramConfig

# The golden ratio's fractional part times 2^62, made odd so that multiplying loses no bit of a token.
_MULTIPLIER = 0x278DDE6E5FD29F05
_SHIFT = 29


class NgramEmbedding(nn.Module):
    """A table of vectors for each order n, indexed by the hash of a token and the n - 1 tokens before it.

    `table` (N * rows, D) concatenates the tables of N orders and is initialised with 0, so that an n-gram that training
    has not seen adds nothing. N-grams do not cross the boundary of a document.
    """

    def __init__(self, config: NgramConfig, d_model: int) -> None:
        super().__init__()
        self.orders, self.rows = config.orders, config.rows
        self.is_sparse = True
        self.table = nn.Parameter(torch.empty(len(config.orders) * config.rows, d_model))

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Returns the sum of the n-gram vectors of each token (B, T, D); the gradient is sparse while `is_sparse`.

        `document_ids` (B, T) number the documents of a row; `cache` provides the tokens before `input_ids` (B, T).
        """
        sparse = self.is_sparse and self.table.requires_grad and torch.is_grad_enabled()
        return functional.embedding(self.places(input_ids, document_ids, cache), self.table, sparse=sparse).sum(0)

    def places(self, input_ids: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Returns the row of `table` for each order and token (N, B, T)."""
        tokens = input_ids + 1  # 0 stands for no token, before a sequence begins
        hashed, places = tokens, []
        for earlier in shifted(tokens, max(self.orders) - 1, document_ids, cache, "ngrams"):
            # Overflow wraps around in the same way on every device.
            hashed = hashed * _MULTIPLIER + earlier
            hashed = hashed ^ (hashed >> _SHIFT)
            places.append(hashed)
        tables = enumerate(self.orders)
        return torch.stack([places[order - 2] % self.rows + table * self.rows for table, order in tables])
