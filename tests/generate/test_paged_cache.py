"""The paged cache against whole passes: the same hidden states, whatever else is read and wherever blocks lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheepop.generate.blocks import BlockManager, BlockTable, Chunk
from sheepop.generate.paged_cache import PagedCache, reaches_of
from sheepop.model import Transformer

NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, rotary": {"num_kv_heads": 2, "position_encoding": "rope"},
    "window": {"sliding_window": 7, "position_encoding": "rope"},
    "windows beside whole rows": {"sliding_window": 5, "sliding_layers": [0, 2], "num_layers": 4},
    "alibi": {"position_encoding": "alibi"},
    "sinks, soft cap": {"attention_sinks": True, "attention_soft_cap": 20.0},
    "n-grams": {"ngrams": {"orders": [2, 4], "rows": 64}},
    "convolutions": {"short_convolution": 3},
    "n-grams, convolutions, window": {
        "ngrams": {"orders": [2, 3], "rows": 64},
        "short_convolution": 5,
        "sliding_window": 6,
    },
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("lookahead", [0, 3])
def test_chunks_of_many_sequences_equal_whole_passes(
    toy_model: Callable[..., Transformer], name: str, lookahead: int
) -> None:
    model = toy_model(**NETWORKS[name]).double()
    draw = random.Random(f"{name} {lookahead}")
    reaches = reaches_of(model)
    manager = BlockManager([64] * len(reaches), reaches, 4)
    cache = PagedCache(model, [64] * len(reaches), 4, lookahead=lookahead)
    beginning = [draw.randrange(128) for _ in range(13)]
    texts = [[*beginning[: draw.randint(0, 13)], *(draw.randrange(128) for _ in range(30))] for _ in range(4)]
    with torch.inference_mode():
        wanted = [model.hidden_states(torch.tensor([text]))[0] for text in texts]
        tables: list[BlockTable | None] = [None] * 4
        for _ in range(60):
            chunks, of = [], []
            for number in draw.sample(range(4), draw.randint(1, 4)):
                table = tables[number]
                if table is None:
                    table = tables[number] = manager.open(texts[number])
                count = min(draw.choice([1, 1, 2, 5, 9, 20]), len(texts[number]) - table.num_tokens)
                if count == 0:
                    manager.close(table)
                    tables[number] = None
                    continue
                copies = manager.reserve(table, count)
                assert copies is not None
                cache.copy(copies)
                chunks.append(Chunk(table, table.num_tokens, count))
                of.append(number)
            if not chunks:
                continue
            read = [token for chunk, n in zip(chunks, of, strict=True) for token in texts[n][chunk.start : chunk.end]]
            cache.read(chunks)
            found = model.hidden_states(torch.tensor(read)[:, None], cache=cache)[:, 0]
            expected = torch.cat([wanted[n][chunk.start : chunk.end] for chunk, n in zip(chunks, of, strict=True)])
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            for chunk, number in zip(chunks, of, strict=True):
                kept = max(1, chunk.count - draw.randint(0, lookahead))
                manager.advance(chunk.table, texts[number], chunk.start + kept)
