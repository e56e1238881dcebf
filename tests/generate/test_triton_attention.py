"""The Triton kernel against a loop over positions in float64; without a GPU, Triton's interpreter runs it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch import Tensor

from sheepop.generate.paged_kernels import AttentionMetadata, KVBlocks, attend_by_triton
from sheepop.model.attention.kernel import Score

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 4
NEEDS_FP8 = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no 8-bit floats"
)
FP8 = pytest.param(torch.float8_e4m3fn, marks=NEEDS_FP8)
STORED = [torch.float32, torch.int8, FP8]


def by_hand(
    q_RHC: Tensor, keys: KVBlocks, values: KVBlocks, metadata: AttentionMetadata, score: Score, slopes: Tensor | None
) -> Tensor:
    rows, heads, width = q_RHC.shape
    group = heads // keys.numbers.shape[1]
    out = torch.zeros(rows, heads, values.numbers.shape[-1], dtype=torch.float64)
    for row, head in product(range(rows), range(heads)):
        scores, found = [], []
        last = int(metadata.last_positions[row])
        first = 0 if metadata.window is None else max(0, last - metadata.window + 1)
        for position in range(first, last + 1):
            block, offset = int(metadata.block_table[row, position // SIZE]), position % SIZE
            key, value = (
                stored.numbers[block, head // group, offset].double().cpu()
                * (1.0 if stored.scales is None else float(stored.scales[block, head // group, offset]))
                for stored in (keys, values)
            )
            s = float(q_RHC[row, head].double().cpu() @ key) * (score.scale or width**-0.5)
            s = s if score.soft_cap is None else score.soft_cap * math.tanh(s / score.soft_cap)
            s -= 0.0 if slopes is None else float(slopes[head]) * (last - position)
            scores.append(s)
            found.append(value)
        sinks = [] if score.sinks is None else [float(score.sinks[head])]
        weights = torch.tensor([*scores, *sinks], dtype=torch.float64).softmax(0)[: len(scores)]
        out[row, head] = (weights[:, None] * torch.stack(found)).sum(0)
    return out


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": 3, "kv_heads": 3, "width": 16, "value_width": 16},
        {"heads": 6, "kv_heads": 2, "width": 12, "value_width": 20, "window": 7},
        {"heads": 4, "kv_heads": 1, "width": 8, "value_width": 8, "sloped": True, "cap": 2.0},
        {"heads": 2, "kv_heads": 2, "width": 8, "value_width": 8, "sinks": True, "scale": 0.7},
    ],
)
def test_every_token_attends_to_its_positions(kind: dict[str, int], stored: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(2)
    heads, kv_heads = kind["heads"], kind["kv_heads"]
    lasts = torch.tensor([0, 5, 70, 211])
    table = torch.randperm(4 * 80, generator=draws).view(4, 80)

    def drawn(width: int) -> KVBlocks:
        shape = 320, kv_heads, SIZE, width
        made = KVBlocks(shape, torch.float32, DEVICE, stored)
        blocks, offsets = torch.arange(320).repeat_interleave(SIZE), torch.arange(SIZE).repeat(320)
        x_NKC = torch.randn(320 * SIZE, kv_heads, width, generator=draws)
        made.store((blocks.to(DEVICE), offsets.to(DEVICE)), x_NKC.to(DEVICE))
        return made

    keys, values = drawn(kind["width"]), drawn(kind["value_width"])
    q_RHC = torch.randn(4, heads, kind["width"], generator=draws).to(DEVICE)
    nothing = torch.empty(0)
    table, lasts = table.to(DEVICE), lasts.to(DEVICE)
    metadata = AttentionMetadata(nothing, table, lasts, (nothing, nothing), kind.get("window"))
    sinks = torch.randn(heads, generator=draws).to(DEVICE) if "sinks" in kind else None
    slopes = torch.rand(heads, generator=draws).to(DEVICE) / 10 if "sloped" in kind else None
    score = Score(kind.get("scale"), kind.get("cap"), sinks)
    found = attend_by_triton(q_RHC, keys, values, metadata, score, slopes)
    expected = by_hand(q_RHC, keys, values, metadata, score, slopes)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", [{}, {"window": 7}, {"sloped": True, "cap": 2.0}, {"sinks": True}])
def test_tiles_of_tokens_attend_as_tokens_alone_do(kind: dict[str, int], stored: torch.dtype) -> None:
    """Chunks of 20, 1 and 7 tokens, of which the first has two tiles."""
    draws = torch.Generator().manual_seed(3)
    starts, counts = [80, 100, 5], [20, 1, 7]
    tiles = [[0, 16, 80, 0], [16, 4, 96, 0], [20, 1, 100, 1], [21, 7, 5, 2]]
    tables = torch.randperm(3 * 26, generator=draws).view(3, 26)
    made = [KVBlocks((78, 2, SIZE, 8), torch.float32, DEVICE, stored) for _ in range(2)]
    for blocks in made:
        slots = torch.arange(78).repeat_interleave(SIZE), torch.arange(SIZE).repeat(78)
        x_NKC = torch.randn(78 * SIZE, 2, 8, generator=draws).to(DEVICE)
        blocks.store((slots[0].to(DEVICE), slots[1].to(DEVICE)), x_NKC)
    lasts = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    sequences = torch.arange(3).repeat_interleave(torch.tensor(counts))
    q_RHC = torch.randn(28, 6, 8, generator=draws).to(DEVICE)
    sinks = torch.randn(6, generator=draws).to(DEVICE) if "sinks" in kind else None
    slopes = torch.rand(6, generator=draws).to(DEVICE) / 10 if "sloped" in kind else None
    score, nothing = Score(None, kind.get("cap"), sinks), torch.empty(0)
    lasts, tables = lasts.to(DEVICE), tables.to(DEVICE)
    rest = lasts, (nothing, nothing), kind.get("window")
    tiled = AttentionMetadata(nothing, tables, *rest, torch.tensor(tiles).to(DEVICE))
    found = attend_by_triton(q_RHC, *made, tiled, score, slopes)
    expected = by_hand(q_RHC, *made, AttentionMetadata(nothing, tables[sequences.to(DEVICE)], *rest), score, slopes)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, FP8])
def test_triton_stores_what_torch_does(stored: torch.dtype) -> None:
    """Six tokens of 3 heads with 5 numbers, which are slices of a larger tensor, in scattered slots; one head is 0."""
    x_NKC = torch.arange(6 * 3 * 9, dtype=torch.float32).view(6, 3, 9)[:, :, 2:7] - 80
    # The interpreter cuts bf16 off and rounds ties of fp8 away from 0; a GPU rounds both as PyTorch does.
    x_NKC += 0.0 if stored == torch.bfloat16 else 0.3
    x_NKC[4, 1] = 0.0
    slots = torch.tensor([7, 0, 3, 3, 2, 7]), torch.tensor([1, 3, 0, 2, 1, 0])
    made = KVBlocks((8, 3, SIZE, 5), torch.float32, DEVICE, stored)
    expected = KVBlocks((8, 3, SIZE, 5), torch.float32, torch.device("cpu"), stored)
    read = made.store_by_triton((slots[0].to(DEVICE), slots[1].to(DEVICE)), x_NKC.to(DEVICE))
    wanted = expected.store(slots, x_NKC)
    for ours, theirs in zip(made.tensors, expected.tensors, strict=True):
        assert torch.equal(ours.float().cpu(), theirs.float())
    assert torch.equal(read.cpu(), wanted)


def test_a_head_with_a_number_that_is_not_finite_is_read_as_none_that_is() -> None:
    stored = KVBlocks((1, 2, SIZE, 4), torch.float32, DEVICE, torch.int8)
    x_NKC = torch.ones(3, 2, 4, device=DEVICE)
    x_NKC[1, 0, 2], x_NKC[2, 1, 0] = torch.nan, torch.inf
    slots = torch.zeros(3, dtype=torch.long, device=DEVICE), torch.arange(3, device=DEVICE)
    read = stored.store_by_triton(slots, x_NKC).isfinite().all(-1).tolist()
    assert read == [[True, True], [False, True], [True, False]]
