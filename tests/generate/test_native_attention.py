"""The CPU's attention kernel against a loop in float64, and its tiles against single tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.generate.blocks import BlockManager, BlockTable, Chunk
from sheepop.generate.paged_attention import PagedAttending, Pass
from sheepop.generate.paged_kernels import KVBlocks, attends_natively
from sheepop.model.attention.kernel import AttentionKind, Score

pytestmark = pytest.mark.skipif(not attends_natively(AttentionKind()), reason="there is no C++ compiler for the kernel")

CPU = torch.device("cpu")
STORED = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
# Query heads, key-value heads, widths of keys and values, the size of blocks, and what else a layer may have.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"heads": (3, 3), "widths": (16, 16), "size": 16},
    "grouped": {"heads": (6, 2), "widths": (64, 64), "size": 16},
    "one head of keys, odd widths": {"heads": (5, 1), "widths": (19, 37), "size": 4},
    "window": {"heads": (4, 4), "widths": (24, 150), "size": 4, "window": 7},
    "window of one, blocks of three": {"heads": (2, 1), "widths": (40, 8), "size": 3, "window": 1},
    "window of two, groups": {"heads": (8, 2), "widths": (32, 32), "size": 16, "window": 2},
    "slopes, cap": {"heads": (4, 2), "widths": (33, 16), "size": 5, "slopes": True, "cap": 2.0},
    "sinks, scale": {"heads": (2, 2), "widths": (8, 9), "size": 16, "sinks": True, "scale": 0.7},
    "everything": {
        "heads": (6, 3),
        "widths": (20, 72),
        "size": 4,
        "window": 11,
        "slopes": True,
        "sinks": True,
        "cap": 5.0,
    },
}


class Layer:
    """A layer whose blocks hold the keys and values of some texts of `lengths` tokens."""

    def __init__(self, layer: dict[str, Any], stored: torch.dtype, lengths: list[int]) -> None:
        draws = torch.Generator().manual_seed(sum(lengths))
        (self.heads, self.kv_heads), (width, value_width), size = layer["heads"], layer["widths"], layer["size"]
        self.lengths, self.size, self.window, self.stored = lengths, size, layer.get("window"), stored
        slopes = torch.rand(self.heads, generator=draws) / 10 if "slopes" in layer else None
        sinks = torch.randn(self.heads, generator=draws) if "sinks" in layer else None
        self.kind = AttentionKind(self.window, slopes, head_dim=width, value_dim=value_width, cached=True)
        self.score = Score(layer.get("scale"), layer.get("cap"), sinks)
        count = sum(-(-length // size) for length in lengths) + 2
        manager = BlockManager([count], [None], size)
        self.tables = [self._shuffled(manager, length, count, draws) for length in lengths]
        self.q, k, v = (
            [torch.randn(length, heads, 1, w, generator=draws) * 2 for length in lengths]
            for heads, w in ((self.heads, width), (self.kv_heads, width), (self.kv_heads, value_width))
        )
        self.keys, self.values = (
            KVBlocks((count + 1, self.kv_heads, size, w), torch.float32, CPU, stored) for w in (width, value_width)
        )
        for table, length, keys, values in zip(self.tables, lengths, k, v, strict=True):
            blocks = torch.tensor(table.blocks[0])[torch.arange(length) // size]
            for to, x in ((self.keys, keys), (self.values, values)):
                to.store((blocks, torch.arange(length) % size), x[:, :, 0])

    @staticmethod
    def _shuffled(manager: BlockManager, length: int, count: int, draws: torch.Generator) -> BlockTable:
        table = manager.open([])
        manager.reserve(table, length)
        order = torch.randperm(len(table.blocks[0]), generator=draws).tolist()
        table.blocks[0][:] = [table.blocks[0][place] for place in order]
        return table

    def attend(self, chunks: list[tuple[int, int, int]], threads: int = 1) -> list[Tensor]:
        """The results (count, H, D) of a pass of these chunks: text, start and count."""
        made = [Chunk(self.tables[text], start, count) for text, start, count in chunks]
        attending = PagedAttending.of_pass(self.kind, Pass(made, self.size, CPU), 0, native=True)
        q = torch.cat([self.q[text][start : start + count] for text, start, count in chunks])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found = attending.attend_blocks(self.keys, self.values, q, q, q, self.score)
        finally:
            torch.set_num_threads(before)
        return list(found[:, :, 0].split([count for *_, count in chunks]))

    def by_hand(self, text: int, position: int, head: int) -> Tensor:
        """The result of a head of a token, in float64."""
        kv_head, seen, scores, values = head // (self.heads // self.kv_heads), self.window or position + 1, [], []
        for place in range(max(0, position + 1 - seen), position + 1):
            block, offset = self.tables[text].blocks[0][place // self.size], place % self.size
            key, value = (
                x.numbers[block, kv_head, offset].double()
                * (1.0 if x.scales is None else x.scales[block, kv_head, offset])
                for x in (self.keys, self.values)
            )
            query = self.q[text][position, head, 0].double()
            scale, cap = self.score.scale or len(query) ** -0.5, self.score.soft_cap
            found = float(query @ key) * scale
            found = found if cap is None else cap * math.tanh(found / cap)
            slope = 0.0 if self.kind.slopes is None else float(self.kind.slopes[head])
            scores.append(found - slope * (position - place))
            values.append(value)
        sinks = [] if self.score.sinks is None else [float(self.score.sinks[head])]
        weights = torch.tensor([*scores, *sinks], dtype=torch.float64).softmax(0)[: len(scores)]
        return (weights[:, None] * torch.stack(values)).sum(0)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", LAYERS)
def test_every_token_of_a_pass_attends_to_its_positions(name: str, stored: torch.dtype) -> None:
    """A text from its beginning, one from its middle, and a single token, in tiles."""
    layer, chunks = Layer(LAYERS[name], stored, [37, 30, 9]), [(0, 0, 37), (1, 11, 19), (2, 8, 1)]
    for (text, start, count), found in zip(chunks, layer.attend(chunks), strict=True):
        expected = torch.stack(
            [torch.stack([layer.by_hand(text, start + t, h) for h in range(layer.heads)]) for t in range(count)]
        )
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_every_pass(
    name: str, stored: torch.dtype, threads: int, data: st.DataObject
) -> None:
    """Whatever the chunks of its text are, and the other texts of the pass."""
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    layer = Layer(LAYERS[name], stored, lengths)
    alone = [torch.cat([layer.attend([(n, t, 1)])[0] for t in range(length)]) for n, length in enumerate(lengths)]
    read = [0] * len(lengths)
    while any(done < length for done, length in zip(read, lengths, strict=True)):
        chunks = []
        for text in data.draw(st.permutations(range(len(lengths)))):
            if left := lengths[text] - read[text]:
                count = left - data.draw(st.integers(0, left - 1))
                chunks.append((text, read[text], count))
                read[text] += count
        for (text, start, count), found in zip(chunks, layer.attend(chunks, threads), strict=True):
            assert torch.equal(found, alone[text][start : start + count])


def test_a_long_text_has_the_same_bits_in_tiles_that_its_length_makes_smaller() -> None:
    """16 tokens with 8 heads of 9,000 positions have more scores than a tile computes at a time."""
    layer = Layer({"heads": (8, 1), "widths": (16, 16), "size": 16}, torch.float32, [9000])
    (found,) = layer.attend([(0, 8960, 40)], threads=2)
    assert torch.equal(found, torch.cat([layer.attend([(0, 8960 + t, 1)])[0] for t in range(40)]))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["grouped", "window", "everything"])
def test_a_number_that_is_not_finite_spoils_only_those_who_see_it(name: str, stored: torch.dtype) -> None:
    """A query its row alone, a key or value the tokens from its own on, as far as a window reaches."""
    layer = Layer(LAYERS[name], stored, [40])
    (expected,) = layer.attend([(0, 0, 40)])
    layer.q[0][13, 1] = torch.nan
    layer.q[0][14, 2, 0, 3] = torch.inf
    (found,) = layer.attend([(0, 0, 40)])
    spoilt = torch.zeros(40, layer.heads, dtype=torch.bool)
    spoilt[13, 1] = spoilt[14, 2] = True
    assert torch.equal(found[~spoilt], expected[~spoilt])
    assert not found[13, 1].isfinite().any()
    for blocks in (layer.keys, layer.values):
        layer = Layer(LAYERS[name], stored, [40])
        blocks = layer.keys if blocks.numbers.shape[-1] == layer.kind.head_dim else layer.values
        block, offset = layer.tables[0].blocks[0][21 // layer.size], 21 % layer.size
        x = torch.full((1, layer.kv_heads, blocks.numbers.shape[-1]), torch.nan)
        blocks.store((torch.tensor([block]), torch.tensor([offset])), x)
        (found,) = layer.attend([(0, 0, 40)])
        seen = torch.zeros(40, dtype=torch.bool)
        seen[21 : 21 + (layer.window or 40)] = True
        assert torch.equal(found[~seen], expected[~seen])
        assert found[seen].isnan().flatten(1).any(1).all()
