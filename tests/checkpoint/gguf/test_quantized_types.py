"""Numbers in the types of GGUF are bit for bit what llama.cpp's own package makes of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.gguf.quantized_types import BF16, F16, F32, Q8_0, TYPES, TensorType, type_of_dtype
from sheepop.core.errors import CheckpointError


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
        theirs = gguf.GGMLQuantizationType[name.upper()]
        block, size = gguf.GGML_QUANT_SIZES[theirs]
        assert kind.number == theirs
        assert kind.size((3, 64)) == 3 * 64 // block * size
    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    assert {name: kind.file_type for name, kind in TYPES.items()} == {
        name: gguf.LlamaFileType[theirs] for name, theirs in file_types.items()
    }
