"""Blocks are chosen as llama.cpp chooses them: as by its own package, or by its formulas in a slow loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sheepop.checkpoint.gguf.block_decoding import pack, unpack
from sheepop.checkpoint.gguf.quantized_types import TYPES
from sheepop.core.errors import CheckpointError

WRITTEN = [name for name, kind in TYPES.items() if kind.block > 1 and kind.write is not None]


def numbers(rows: int = 4, columns: int = 512, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=generator) * 0.05
    found[0, 256:] = 0
    found[1] = found[1].abs()  # all on one side of zero
    found[2, :32] = -0.25
    return found


def error(rows: torch.Tensor, back: torch.Tensor) -> float:
    return float((rows.double() - back.double()).square().mean().sqrt())


@pytest.mark.parametrize(("width", "run"), [(1, 1), (1, 32), (2, 4), (2, 32), (4, 16), (4, 64)])
def test_packed_integers_come_back(width: int, run: int) -> None:
    integers = torch.randint(0, 2**width, (3, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(integers, width, run), width, run), integers)


def test_all_types_that_files_are_written_in_are_covered() -> None:
    assert WRITTEN == ["q4_0", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q5_1"])
def test_blocks_of_32_equal_those_of_llama_cpps_own_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = numbers()
    theirs = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert TYPES[name].encode(rows).numpy().tobytes() == theirs.tobytes()


def fit(group: list[float], largest: int, first: float, steps: int) -> tuple[float, float]:
    """The scale and the offset of a group, one number at a time."""
    root = math.sqrt(sum(x * x for x in group) / len(group))
    weights = [root + abs(x) for x in group]
    least, most = min(0.0, *group), max(group)
    if least == most:
        return 0.0, -least

    def rounded(inverse: float) -> list[int]:
        return [max(0, min(largest, round(inverse * (x - least)))) for x in group]

    def miss(scale: float, low: float, integers: list[int]) -> float:
        return sum(w * (scale * q + low - x) ** 2 for w, q, x in zip(weights, integers, group, strict=True))

    scale = (most - least) / largest
    best = miss(scale, least, rounded(1 / scale))
    for step in range(steps):
        integers = rounded((largest + first + 0.1 * step) / (most - least))
        # The normal equations of least squares: sums over the group of weight, weight * q, weight * q * q, and so on.
        system = np.array([
            [sum(w * q * q for w, q in zip(weights, integers, strict=True)),
             sum(w * q for w, q in zip(weights, integers, strict=True))],
            [sum(w * q for w, q in zip(weights, integers, strict=True)), sum(weights)],
        ])  # fmt: skip
        right = np.array([
            sum(w * q * x for w, q, x in zip(weights, integers, group, strict=True)),
            sum(w * x for w, x in zip(weights, group, strict=True)),
        ])  # fmt: skip
        if np.linalg.det(system) <= 0:
            continue
        found, low = np.linalg.solve(system, right)
        if low > 0:
            found, low = right[0] / system[0, 0], 0.0
        if miss(found, low, integers) < best:
            best, scale, least = miss(found, low, integers), found, low
    return scale, -least


def with_offsets(block: list[float], largest: int, first: float, steps: int) -> list[float]:
    """A block of 256 numbers after it was stored with scales and offsets of six bits."""
    fitted = [fit(block[start : start + 32], largest, first, steps) for start in range(0, 256, 32)]
    stored = []
    for values in zip(*fitted, strict=True):
        most = max(0.0, *values)
        half = float(np.float16(most / 63))
        stored.append([half * min(63, round(63 / most * value)) if most else 0.0 for value in values])
    back = []
    for index, x in enumerate(block):
        scale, offset = stored[0][index // 32], stored[1][index // 32]
        back.append((scale * max(0, min(largest, round((x + offset) / scale))) if scale else 0.0) - offset)
    return back


def with_scales(block: list[float]) -> list[float]:
    """A block of 256 numbers after it was stored in q6_k."""
    scales = []
    for start in range(0, 256, 16):
        group = block[start : start + 16]
        outermost = max(group, key=abs)
        scale = best = 0.0
        for guess in (0, *range(-9, 0), *range(1, 10)):
            if not outermost:
                break
            integers = [max(-32, min(31, round(-(32 + 0.1 * guess) / outermost * x))) for x in group]
            product = sum(x**3 * q for x, q in zip(group, integers, strict=True))
            square = sum(x**2 * q**2 for x, q in zip(group, integers, strict=True))
            if square and product**2 / square > best:
                best, scale = product**2 / square, product / square
        scales.append(scale)
    outermost = max(scales, key=abs)
    if not outermost:
        return [0.0] * 256
    half = float(np.float16(outermost / -128))
    back = []
    for index, x in enumerate(block):
        step = half * min(127, round(-128 / outermost * scales[index // 16]))
        back.append(step * max(-32, min(31, round(x / step))) if step else 0.0)
    return back


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("q4_k", lambda block: with_offsets(block, 15, -1.0, 21)),
        ("q5_k", lambda block: with_offsets(block, 31, -0.5, 16)),
        ("q6_k", with_scales),
    ],
)
def test_blocks_of_256_are_fitted_as_in_a_slow_loop(name: str, slow: object) -> None:
    rows = numbers()
    back = TYPES[name].decode(TYPES[name].encode(rows), 512)
    wanted = torch.tensor([slow(block) for block in rows.double().reshape(-1, 256).tolist()]).reshape(back.shape)  # type: ignore[operator]
    # A tie between two scales may be decided otherwise in single precision.
    same = (back - wanted).abs() <= 1e-6 * rows.abs().max()
    assert same.double().mean() > 0.98
    assert error(rows, back) <= error(rows, wanted) * 1.001


@pytest.mark.parametrize(("name", "share"), [
    ("q4_0", 0.1), ("q5_0", 0.05), ("q5_1", 0.05), ("q8_0", 0.006), ("q4_k", 0.08), ("q5_k", 0.04), ("q6_k", 0.02),
])  # fmt: skip
def test_more_bits_are_nearer(name: str, share: float) -> None:
    rows = numbers(rows=8)[3:]
    assert error(rows, TYPES[name].decode(TYPES[name].encode(rows), 512)) < share * float(rows.square().mean().sqrt())


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38])
def test_what_no_block_can_hold_is_refused(name: str, number: float) -> None:
    rows = torch.zeros(2, 256)
    rows[1, 5] = number
    with pytest.raises(CheckpointError, match="not finite, or too large"):
        TYPES[name].encode(rows)


@pytest.mark.parametrize("name", WRITTEN)
def test_tiny_and_zero_numbers_become_zero(name: str) -> None:
    rows = torch.zeros(3, 256)
    rows[1] = 1e-44
    rows[2, 7] = 1e-20
    assert TYPES[name].decode(TYPES[name].encode(rows), 256).count_nonzero() == 0
