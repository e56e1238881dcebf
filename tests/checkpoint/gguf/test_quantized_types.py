"""Numbers in the types of GGUF are bit for bit what llama.cpp's own package makes of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.adapt.stored_weight import Format, StoredWeight, has_kernels
from sheepop.checkpoint.gguf.quantized_types import BF16, F16, F32, TYPES, TensorType, stored_parts, type_of_dtype
from sheepop.checkpoint.model_description import is_stored_weight
from sheepop.core.errors import CheckpointError

Q8_0 = TYPES["q8_0"]


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-34, 6), columns=st.sampled_from([32, 64, 96]))
@settings(max_examples=60)
def test_q8_0_equals_the_reference_bit_for_bit(seed: int, exponent: int, columns: int) -> None:
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(seed)
    numbers = (generator.standard_normal((7, columns)) * 10.0**exponent).astype(np.float32)
    numbers[0] = 0
    numbers[1, ::3] = 0
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.quantize(numbers, kind)
    assert Q8_0.encode(torch.from_numpy(numbers)).numpy().tobytes() == theirs.tobytes()
    ours = Q8_0.decode(torch.from_numpy(theirs), columns)
    assert ours.numpy().tobytes() == gguf.quants.dequantize(theirs, kind).tobytes()


def test_q8_0_of_a_block_worked_by_hand() -> None:
    # The largest magnitude is 254, so the scale is 2: 127 steps of 2. Halves go away from zero: 3 / 2 is 1.5, and 2.
    block = torch.tensor([[254.0, -254.0, 3.0, -3.0, 1.0, -1.0, 0.9, 2.9, 100.0] + [0.0] * 23])
    encoded = Q8_0.encode(block).numpy().tobytes()
    assert struct.unpack("<e32b", encoded) == (2.0, 127, -127, 2, -2, 1, -1, 0, 1, 50, *[0] * 23)
    assert Q8_0.decode(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), 32)[0, :9].tolist() == [
        254.0, -254.0, 4.0, -4.0, 2.0, -2.0, 0.0, 2.0, 100.0,
    ]  # fmt: skip


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_q8_0_is_off_by_half_a_step_at_most(numbers: list[float]) -> None:
    step = max(abs(number) for number in numbers) / 127
    back = Q8_0.decode(Q8_0.encode(torch.tensor([numbers])), 32)[0].tolist()
    # The scale itself is rounded to 11 binary digits, or to a multiple of 2^-24.
    scale_error = 127 * max(step * 2**-11, 2**-25)
    assert all(abs(one - other) <= step / 2 + scale_error for one, other in zip(numbers, back, strict=True))


def test_what_q8_0_stored_is_stored_again_as_it_is() -> None:
    encoded = Q8_0.encode(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(Q8_0.encode(Q8_0.decode(encoded, 64)), encoded)


def test_numbers_too_small_for_a_scale_become_zero() -> None:
    tiny = torch.full((1, 32), 1e-44)
    assert Q8_0.decode(Q8_0.encode(tiny), 32).count_nonzero() == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_q8_0_refuses_what_its_scale_cannot_hold(number: float) -> None:
    rows = torch.zeros(2, 32)
    rows[1, 5] = number
    with pytest.raises(CheckpointError, match="not finite, or too large"):
        Q8_0.encode(rows)


@pytest.mark.parametrize(("kind", "layout"), [(F32, "<f"), (F16, "<e")])
def test_floats_are_those_of_struct(kind: TensorType, layout: str) -> None:
    numbers = [0.0, -0.0, 1.0, 1 / 3, -65504.0, 6e-8, 1e-30]
    encoded = kind.encode(torch.tensor([numbers])).numpy().tobytes()
    assert encoded == b"".join(struct.pack(layout, number) for number in np.float32(numbers))


def test_bfloat16_is_the_upper_half_of_a_float() -> None:
    numbers = [1.0, -2.5, 3.140625, 2.0**100]  # none needs rounding
    encoded = BF16.encode(torch.tensor([numbers])).numpy().tobytes()
    assert encoded == b"".join(struct.pack("<f", number)[2:] for number in numbers)


def test_half_precision_refuses_what_is_too_large() -> None:
    with pytest.raises(CheckpointError, match="70000, but the largest number of f16 is 65504"):
        F16.encode(torch.tensor([[1.0, -70000.0]]))
    # What is infinite already stays so, as in any conversion.
    assert F16.encode(torch.tensor([[float("inf")]])).view(torch.float16).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_dtype_has_the_type_that_keeps_it(dtype: torch.dtype) -> None:
    kind = type_of_dtype(dtype)
    numbers = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(kind.decode(kind.encode(numbers), 5), numbers)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="float64"):
        type_of_dtype(torch.float64)


def test_numbers_of_the_types_are_those_of_the_format() -> None:
    gguf = pytest.importorskip("gguf")
    for name, kind in TYPES.items():
        if name == "q2_0":  # newer than the package
            continue
        theirs = gguf.GGMLQuantizationType[name.upper()]
        block, size = gguf.GGML_QUANT_SIZES[theirs]
        assert kind.number == theirs
        assert kind.size((3, 512)) == 3 * 512 // block * size
        assert block == 1 or kind.size((3, 511)) is None


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes, of which those that are read as a scale are a number."""
    kind, generator = TYPES[name], np.random.default_rng(seed)
    found = generator.integers(0, 256, (4 * count + 40, kind.block_bytes), dtype=np.uint8)
    if name == "nvfp4":
        found[:, :4] &= 127  # its scales have no sign
    finite = kind.read(torch.from_numpy(found)).isfinite().all(dim=1).numpy()
    return found[finite][:count]


# The last two are newer than what the package converts.
BLOCK_TYPES = [name for name, kind in TYPES.items() if kind.block > 1 and name not in ("q1_0", "q2_0")]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_quantised_type_is_read_as_by_llama_cpps_own_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    columns = 3 * TYPES[name].block
    rows = random_blocks(name, 30).reshape(10, -1)
    theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    ours = TYPES[name].decode(torch.from_numpy(rows), columns)
    assert ours.dtype == torch.float32
    assert ours.numpy().tobytes() == theirs.astype(np.float32).tobytes()
    assert as_stored(name, rows).rows().numpy().tobytes() == ours.numpy().tobytes()


def stored(kind: TensorType, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Integers, scales and perhaps offsets of blocks."""
    assert kind.fill_stored is not None
    parts = [part.new_empty(len(blocks), part.shape[1]) for part in kind.stored_block]
    kind.fill_stored(blocks, parts)
    return parts


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_block_is_read_wherever_it_lies_natively_and_by_pytorch(name: str) -> None:
    kind, rows = TYPES[name], torch.from_numpy(random_blocks(name, 9))
    found = stored(kind, rows)
    for part, other in zip(found, stored_parts(name, kind.block, rows), strict=True):
        assert torch.equal(part, other)
    bytes_behind = torch.cat([torch.zeros(1, dtype=torch.uint8), rows[0]])[1:]
    for part, other in zip(found, stored_parts(name, kind.block, bytes_behind[None]), strict=True):
        assert torch.equal(part[:1], other)


def as_stored(name: str, rows: np.ndarray) -> StoredWeight:
    """Rows of blocks as the network stores them."""
    kind = TYPES[name]
    parts = stored(kind, torch.from_numpy(rows).reshape(-1, kind.block_bytes))
    numbers, scales, *offsets = (part.reshape(len(rows), -1) for part in parts)
    form: Format = "int4" if numbers.dtype == torch.uint8 else "int8"
    assert is_stored_weight(form, numbers, scales, *offsets or [None])
    return StoredWeight(form, numbers, scales, torch.float32, *offsets)


# The bits of a weight in memory: 4 or 8, and a scale, perhaps an offset, of 32 bits for each 16 or 32.
BITS = {
    **dict.fromkeys(("q4_0", "q1_0", "q2_0", "tq1_0", "tq2_0"), 5), **dict.fromkeys(("q4_1", "q4_k", "q3_k"), 6),
    "q2_k": 8, **dict.fromkeys(("q5_1", "q5_k", "q6_k", "nvfp4", "iq2_xs", "iq2_s", "iq1_m"), 10),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.block > 1])
def test_every_quantised_type_has_a_stored_form_with_a_kernel(name: str) -> None:
    rows = random_blocks(name, 6).reshape(2, -1)
    weight = as_stored(name, rows)
    assert sum(part.nbytes for part in weight.parts if part is not None) * 8 == BITS.get(name, 9) * weight.numel()
    assert weight.group in (16, 32)
    numbers = TYPES[name].decode(torch.from_numpy(rows), weight.shape[-1])
    assert torch.equal(weight.rows(), numbers)
    assert weight.kernel is not None or not has_kernels()


def test_blocks_worked_by_hand() -> None:
    half = struct.pack("<e", 0.5)
    # Low nibbles are the first half of a block of q4_0, high ones the second; 8 stands for zero.
    found = TYPES["q4_0"].decode(torch.tensor([[*half, 0x19, *[0x88] * 15]], dtype=torch.uint8), 32)[0]
    assert found.tolist() == [0.5, *[0.0] * 15, -3.5, *[0.0] * 15]
    # The first byte of high bits belongs to the first eight numbers of q5_0; 16 stands for zero.
    high = [0b00000001, 0xFF, 0xFF, 0xFF]
    found = TYPES["q5_0"].decode(torch.tensor([[*half, *high, 2, *[0] * 15]], dtype=torch.uint8), 32)[0]
    assert found.tolist() == [1.0, *[-8.0] * 7, *[0.0] * 24]
    # In q4_k the first group of 32 has scale 3 and offset 2, the last 16 + 5 and 32 + 7: each has six bits.
    small = [3, 0, 0, 0b01000000, 2, 0, 0, 0b10000000, 0, 0, 0, 0x75]
    low = [0x0A, *[0] * 127]
    content = torch.tensor([[*half, *struct.pack("<e", 2.0), *small, *low]], dtype=torch.uint8)
    found = TYPES["q4_k"].decode(content, 256)[0].reshape(8, 32)
    assert found[0].tolist() == [0.5 * 3 * 10 - 2 * 2, *[-4.0] * 31]
    assert found[7].tolist() == [-2.0 * 39] * 32
    low[96 + 31] = 0xF0
    content = torch.tensor([[*half, *struct.pack("<e", 2.0), *small, *low]], dtype=torch.uint8)
    assert TYPES["q4_k"].decode(content, 256)[0, 255] == 0.5 * 21 * 15 - 78
    # A scale of mxfp4 is 2 ** (exponent - 127), and its numbers are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    found = TYPES["mxfp4"].decode(torch.tensor([[128, 0xF7, *[0x10] * 15]], dtype=torch.uint8), 32)[0]
    assert found.tolist() == [12.0, *[0.0] * 15, -12.0, *[1.0] * 15]
    # q1_0 has a sign for each of 128 numbers; q2_0 has -1, 0, 1 or 2, the first in the lowest bits.
    found = TYPES["q1_0"].decode(torch.tensor([[*half, 0b00000101, *[0] * 15]], dtype=torch.uint8), 128)[0]
    assert found.tolist() == [0.5, -0.5, 0.5, *[-0.5] * 125]
    found = TYPES["q2_0"].decode(torch.tensor([[*half, 0b11100100, *[0x55] * 15]], dtype=torch.uint8), 64)[0]
    assert found.tolist() == [-0.5, 0.0, 0.5, 1.0, *[0.0] * 60]
