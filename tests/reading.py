"""Texts that a network reads piece by piece, through the cache that generation uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sheepop.generate.blocks import BlockManager, BlockTable, Chunk
from sheepop.generate.paged_cache import PagedCache, reaches_of
from sheepop.model import Memory, Transformer


class PieceReader:
    """Reads further tokens of several texts in each pass; with an encoder-decoder text b is a target of row b of
    `memory`."""

    def __init__(
        self, model: Transformer, num_texts: int, *, memory: Memory | None = None, num_blocks: int = 64, size: int = 4
    ) -> None:
        reaches = reaches_of(model)
        self.model, self.memory = model, memory
        self.manager = BlockManager([num_blocks] * len(reaches), reaches, size)
        self.cache = PagedCache(model, [num_blocks] * len(reaches), size)
        self.tables: list[BlockTable] = [self.manager.open([0], str(number)) for number in range(num_texts)]
        self.sources = list(range(num_texts))

    def read(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The hidden states (T_b, D) of the next tokens (T_b,) of every text; some may have none."""
        of = [number for number, piece in enumerate(pieces) if len(piece)]
        chunks = [Chunk(self.tables[n], self.tables[n].num_tokens, len(pieces[n])) for n in of]
        for chunk in chunks:
            copies = self.manager.reserve(chunk.table, chunk.count)
            assert copies is not None
            self.cache.copy(copies)
        self.cache.read(chunks, [self.sources[n] for n in of])
        inputs: dict[str, Any] = {}
        if self.memory is not None:
            rows = [self.sources[n] for n, chunk in zip(of, chunks, strict=True) for _ in range(chunk.count)]
            inputs["memory"] = self.memory.rows(torch.tensor(rows))
        new = torch.cat([pieces[n] for n in of])[:, None]
        hidden = self.model.hidden_states(new, cache=self.cache, **inputs)[:, 0]
        for chunk in chunks:
            # What the tokens were does not matter: no text shares with another.
            self.manager.advance(chunk.table, [0] * chunk.end, chunk.end)
        return list(hidden.split([len(piece) for piece in pieces]))


def read_in_pieces(
    model: Transformer, texts: Sequence[Tensor], steps: Sequence[Sequence[int]], memory: Memory | None = None
) -> list[Tensor]:
    """The hidden states (T_b, D) of all texts (T_b,), of which `steps[i][b]` tokens are read in pass i."""
    reader = PieceReader(model, len(texts), memory=memory)
    begun, found = [0] * len(texts), []
    for counts in steps:
        ends = [start + count for start, count in zip(begun, counts, strict=True)]
        found.append(reader.read([text[a:b] for text, a, b in zip(texts, begun, ends, strict=True)]))
        begun = ends
    return [torch.cat(states) for states in zip(*found, strict=True)]
