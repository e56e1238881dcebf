"""The paged cache against whole passes: the same hidden states in any batch and with any blocks."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.adapt.stored_weight import has_kernels
from sheepop.generate.blocks import BlockTable, Chunk
from sheepop.generate.config import CacheDtype
from sheepop.generate.paged_cache import PagedCache, block_manager
from sheepop.generate.paged_kernels import KVBlocks, storing_kernel
from sheepop.model import Transformer

from ..command_line import Launcher
from .conftest import SHARED, RoundedPass, rounded

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
FEW = ("grouped, rotary", "windows beside whole rows", "latent, queries too, sinks", "shared keys", "delta net")


# The settings of a cache, how whole passes in float64 round keys and values, and the tolerance of float32 against them,
# or of float64.
WAYS: dict[str, tuple[dict[str, Any], CacheDtype, torch.dtype, float]] = {
    "float64": ({}, "auto", torch.float64, 1e-10),
    "float64, three taken back": ({"lookahead": 3}, "auto", torch.float64, 1e-10),
    "kernels of our own": ({"lookahead": 3}, "auto", torch.float32, 2e-4),
    "every token apart": ({"batch_invariant": True}, "auto", torch.float32, 2e-4),
    "int8": ({"cache_dtype": "int8"}, "auto", torch.float32, 0.15),
    "int8, every token apart": ({"cache_dtype": "int8", "batch_invariant": True}, "auto", torch.float32, 0.15),
    "int8, as rounded": ({"cache_dtype": "int8", "lookahead": 3}, "int8", torch.float64, 1e-5),
    "int8, as rounded, apart": ({"cache_dtype": "int8", "batch_invariant": True}, "int8", torch.float32, 0.01),
    "fp8": ({"cache_dtype": "fp8"}, "auto", torch.float32, 0.5),
    "fp8, as rounded": ({"cache_dtype": "fp8", "lookahead": 3}, "fp8", torch.float64, 1e-5),
    "fp8, as rounded, apart": ({"cache_dtype": "fp8", "batch_invariant": True}, "fp8", torch.float32, 0.01),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in WAYS for name in (FEW if "fp8" in way or "as rounded" in way else NETWORKS)],
)
def test_chunks_of_many_sequences_equal_whole_passes(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    (settings, rounding, dtype, error), exact = WAYS[way], toy_model(**NETWORKS[name]).double()
    model = toy_model(**NETWORKS[name]).to(dtype)
    lookahead = settings.get("lookahead", 0)
    if dtype == torch.float32:
        if not has_kernels():
            pytest.skip("there is no C++ compiler for the kernels")
        monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    draw = random.Random(f"{name} {way}")
    manager = block_manager(model, 64, 4, max_sequences=5, lookahead=lookahead)
    cache = PagedCache(model, manager.num_blocks, 4, **settings)
    beginning = [draw.randrange(128) for _ in range(13)]
    texts = [[*beginning[: draw.randint(0, 13)], *(draw.randrange(128) for _ in range(30))] for _ in range(4)]
    with torch.inference_mode():
        whole = None if rounding == "auto" else RoundedPass(rounding)
        wanted = [exact.hidden_states(torch.tensor([text]), cache=whole)[0] for text in texts]
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
            assert (found - expected).abs().max() <= error * expected.abs().max()
            for chunk, number in zip(chunks, of, strict=True):
                kept = max(1, chunk.count - draw.randint(0, lookahead))
                manager.advance(chunk.table, texts[number], chunk.start + kept)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_rounded_blocks_hold_each_head_of_a_token_in_steps(cache_dtype: CacheDtype) -> None:
    """Of e4m3 they are 1/16 of a number at most, or 2^-10 of the 448 that the largest number becomes."""
    dtype = torch.int8 if cache_dtype == "int8" else torch.float8_e4m3fn
    stored = KVBlocks((3, 2, 4, 8), torch.float32, torch.device("cpu"), dtype)
    x_NKC = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    x_NKC[0, 0] = 0.0
    x_NKC[1, 1, :4] *= 1e-4
    read = stored.store((torch.tensor([2, 0]), torch.tensor([1, 3])), x_NKC)
    top = x_NKC.abs().amax(-1, keepdim=True)
    half_steps = top / 127 / 2 if cache_dtype == "int8" else (x_NKC.abs() / 16).maximum(top / 448 * 2**-10)
    assert ((read - x_NKC).abs() <= half_steps * 1.0001).all()
    assert torch.allclose(read.double(), rounded(x_NKC.double(), cache_dtype), rtol=1e-6, atol=0)
    found = stored.gather(torch.tensor([[2, 0]]), 8)
    assert torch.equal(found[0, :, 1], read[0])
    assert torch.equal(found[0, :, 7], read[1])
    assert not found[0, :, [0, 2, 3, 4, 5, 6]].any()


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler for the kernels")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_native_code_stores_what_torch_does(stored: torch.dtype) -> None:
    """Numbers of all sizes, those between two codes, and heads that are not finite, whose numbers may be any."""
    blocks = [KVBlocks((1, 1, 80, 256), torch.float32, torch.device("cpu"), stored) for _ in range(2)]
    x_NKC = torch.randn(80, 1, 256, generator=torch.Generator().manual_seed(1))
    x_NKC *= torch.logspace(-6, 6, 256)
    x_NKC[1], x_NKC[2], x_NKC[3, 0, 5], x_NKC[4, 0, 7] = 0.0, 1e-40, torch.nan, -torch.inf
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0, 448.0)
    x_NKC[5], x_NKC[6] = codes, codes.sort().values.unfold(0, 2, 1).mean(1)[torch.arange(256).clamp(max=254)]
    read_NKC = blocks[0].store((torch.zeros(80, dtype=torch.long), torch.arange(80)), x_NKC)
    write = storing_kernel(stored)
    for entry, x_C in enumerate(x_NKC[:, 0]):
        scales = blocks[1].scales
        addresses = blocks[1].numbers.data_ptr(), None if scales is None else scales.data_ptr()
        write(*map(ctypes.c_void_p, addresses), entry, ctypes.c_void_p(x_C.data_ptr()), 256)
    expected, found = (each.gather(torch.tensor([[0]]), 80)[0, 0] for each in blocks)
    whole = [row for row in range(80) if row not in (3, 4)]
    assert torch.equal(found[whole], expected[whole])
    assert torch.equal(read_NKC[whole, 0], expected[whole])
    if blocks[0].scales is not None:
        assert not found[3:5].isfinite().any()


# Memory that a process keeps after it was freed is no source of blocks: the allocator would write zeros all over it.
BLOCKS_OF_A_RUN = """
import torch
from sheepop.core.device import keep_freed_memory
from sheepop.generate.paged_kernels import zeros
keep_freed_memory("cpu")
freed, kept = torch.ones(25_000_000), torch.ones(1000)
del freed
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
blocks = [zeros((50, 1_000_000), torch.float16, torch.device("cpu")) for _ in range(8)]
print(resident() - before, *(int(each[-1].count_nonzero()) for each in blocks))
blocks[0][0] = 1
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_blocks_take_memory_where_they_are_written(launcher: Launcher) -> None:
    ended = launcher.run(program=BLOCKS_OF_A_RUN)
    assert ended.code == 0, ended.err
    (before, *counts), (after,) = (list(map(int, line.split())) for line in ended.out.splitlines())
    assert counts == [0] * 8
    # Each count maps the zeros that it reads, 2 MB of 100; what is written is 2 MB, in pages of at most 2 MB.
    assert before < 8 * 8_000_000 and 2_000_000 <= after - before < 8_000_000
