"""The paged cache against whole passes: the same hidden states in any batch and with any blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheepop.adapt.stored_weight import has_kernels
from sheepop.generate.blocks import BlockTable, Chunk
from sheepop.generate.paged_cache import PagedCache, block_manager
from sheepop.generate.paged_kernels import KVBlocks
from sheepop.model import Transformer

from .conftest import SHARED

DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5}
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, rotary": {"num_kv_heads": 2, "position_encoding": "rope"},
    "window": {"sliding_window": 7, "position_encoding": "rope"},
    "windows beside whole rows": {"sliding_window": 5, "sliding_layers": [0, 2], "num_layers": 4},
    "alibi": {"position_encoding": "alibi"},
    "sinks, soft cap": {"attention_sinks": True, "attention_soft_cap": 20.0},
    "latent": {
        "position_encoding": "rope",
        "head_dim": 12,
        "latent_attention": {"kv_rank": 6, "rope_head_dim": 4},
        "sliding_window": 7,
        "sliding_layers": [1],
    },
    "latent, queries too, sinks": {
        "latent_attention": {"kv_rank": 3, "q_rank": 5, "rope_head_dim": 2},
        "value_head_dim": 5,
        "attention_sinks": True,
        "attention_soft_cap": 20.0,
    },
    "shared keys": SHARED,
    "n-grams": {"ngrams": {"orders": [2, 4], "rows": 64}},
    "convolutions": {"short_convolution": 3},
    "gated convolutions": {"gated_convolution": {"layers": [1], "width": 4}},
    "delta net": {"gated_delta_net": {"layers": [0], **DELTA}, "num_layers": 3, "attention_output_gate": True},
    "delta net, window, n-grams": {
        "gated_delta_net": {"layers": [1, 2], "width": 2, **DELTA},
        "num_layers": 3,
        "sliding_window": 6,
        "ngrams": {"orders": [2], "rows": 64},
    },
    "n-grams, convolutions, window": {
        "ngrams": {"orders": [2, 3], "rows": 64},
        "short_convolution": 5,
        "sliding_window": 6,
    },
}


# The settings of a cache, and the tolerance of float32 against whole passes in float64; None also computes in float64.
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "float64": ({}, None),
    "float64, three taken back": ({"lookahead": 3}, None),
    "kernels of our own": ({"lookahead": 3}, 2e-4),
    "every token apart": ({"batch_invariant": True}, 2e-4),
    "int8": ({"in_int8": True}, 0.15),
    "int8, every token apart": ({"in_int8": True, "batch_invariant": True}, 0.15),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", WAYS)
def test_chunks_of_many_sequences_equal_whole_passes(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    (settings, error), exact = WAYS[way], toy_model(**NETWORKS[name]).double()
    model = exact if error is None else toy_model(**NETWORKS[name])
    lookahead = settings.get("lookahead", 0)
    if error is not None:
        if not has_kernels():
            pytest.skip("there is no C++ compiler for the kernels")
        monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    draw = random.Random(f"{name} {way}")
    manager = block_manager(model, 64, 4, max_sequences=5, lookahead=lookahead)
    cache = PagedCache(model, manager.num_blocks, 4, **settings)
    beginning = [draw.randrange(128) for _ in range(13)]
    texts = [[*beginning[: draw.randint(0, 13)], *(draw.randrange(128) for _ in range(30))] for _ in range(4)]
    with torch.inference_mode():
        wanted = [exact.hidden_states(torch.tensor([text]))[0] for text in texts]
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
            assert (found - expected).abs().max() <= (1e-10 if error is None else error) * expected.abs().max()
            for chunk, number in zip(chunks, of, strict=True):
                kept = max(1, chunk.count - draw.randint(0, lookahead))
                manager.advance(chunk.table, texts[number], chunk.start + kept)


def test_rounded_blocks_hold_each_head_of_a_token_in_255_steps() -> None:
    stored = KVBlocks((3, 2, 4, 8), torch.float32, torch.device("cpu"), in_int8=True)
    x_NKC = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    x_NKC[0, 0] = 0.0
    read = stored.store((torch.tensor([2, 0]), torch.tensor([1, 3])), x_NKC)
    steps = x_NKC.abs().amax(-1, keepdim=True) / 127
    assert ((read - x_NKC).abs() <= steps * 0.5001).all()
    found = stored.gather(torch.tensor([[2, 0]]), 8)
    assert torch.equal(found[0, :, 1], read[0])
    assert torch.equal(found[0, :, 7], read[1])
    assert not found[0, :, [0, 2, 3, 4, 5, 6]].any()
