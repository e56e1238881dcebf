"""Weights in other forms: what is stored is what was meant, and products with it are right."""

from __future__ import annotations

import math
import platform
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.adapt import stored_weight
from sheepop.adapt.quantization import quantized
from sheepop.adapt.stored_weight import Format, StoredWeight
from sheepop.core.native import levels, load_kernel
from sheepop.model.experts.grouped_product import grouped_product

# A format; a group of neighbours that share a scale; the type of the scales; and whether there are offsets.
GROUPED: dict[str, tuple[Format, int, torch.dtype, bool]] = {
    "int8 in 16s": ("int8", 16, torch.float32, False),
    "int8 in 16s with offsets": ("int8", 16, torch.float32, True),
    "int8 in 32s": ("int8", 32, torch.float32, False),
    "int8 in 32s with offsets": ("int8", 32, torch.float32, True),
    "int8 in 8s": ("int8", 8, torch.float32, True),  # for which there is no kernel
    "int4 in 16s": ("int4", 16, torch.float32, False),
    "int4 in 16s with offsets": ("int4", 16, torch.float32, True),
    "int4 in 32s": ("int4", 32, torch.float32, False),
    "int4 in 32s with offsets": ("int4", 32, torch.float32, True),
    "int4 in 32s with halves": ("int4", 32, torch.bfloat16, False),
}
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "fp8", *GROUPED)
INTEGERS = ("int8", "int4", *(form for form, (_, group, *_) in GROUPED.items() if group > 8))
UNIT = 2.0**-24  # the largest relative error of a rounding to float32
FLOATS_SOURCE, INTEGERS_SOURCE = stored_weight._SOURCE, stored_weight.SOURCE_OF_INTEGERS
needs_compiler = pytest.mark.skipif(not stored_weight.has_kernels(), reason="there is no C++ compiler for the kernels")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored_as(weight: Tensor, form: str) -> StoredWeight:
    """`weight` (..., N, K) in a form; drawn numbers, scales and offsets of its shape where the form has groups."""
    if form in GROUPED:
        stored, group, dtype, has_offsets = GROUPED[form]
        generator = torch.Generator().manual_seed(weight.shape[-1])
        numbers = torch.randint(0, 256, weight.shape, generator=generator).to(torch.uint8)
        numbers = numbers[..., ::2].contiguous() if stored == "int4" else numbers.view(torch.int8)
        shape = (*weight.shape[:-1], weight.shape[-1] // group)
        scales, offsets = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        return StoredWeight(stored, numbers, scales / 64, torch.float32, offsets if has_offsets else None)
    if form in ("int8", "int4", "fp8"):
        return quantized(weight, form)
    dtype = getattr(torch, form)
    return StoredWeight(form, weight.to(dtype), None, dtype)


def e4m3(byte: int) -> float:
    """A sign, four bits of exponent with bias 7, three of fraction (Micikevicius et al. 2022, table 1)."""
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (math.ldexp(fraction / 8, -6) if exponent == 0 else math.ldexp(1 + fraction / 8, exponent - 7))


def decoded(weight: StoredWeight) -> list[list[float]]:
    """The matrix, one number at a time, as the class describes its storage."""
    numbers = weight.parts[0].view(torch.uint8) if weight.stored == "fp8" else weight.parts[0]
    values, scales = numbers.tolist(), None if weight.parts[1] is None else weight.parts[1].float().tolist()
    offsets = None if (found := weight.parts[2]) is None else found.float().tolist()
    if scales is None:
        return values
    rows = []
    for number, stored in enumerate(values):
        codes = [_nibble(stored, place, offsets is None) for place in range(2 * len(stored))]
        codes = {"int4": codes, "fp8": [e4m3(code) for code in stored]}.get(weight.stored, stored)
        group = weight.group or len(codes)
        row_scales = scales[number] if weight.group else [scales[number]]
        row_offsets = [0.0] * len(row_scales) if offsets is None else offsets[number]
        rows.append([code * row_scales[at // group] + row_offsets[at // group] for at, code in enumerate(codes)])
    return rows


def _nibble(stored: list[int], place: int, is_signed: bool) -> int:
    """The code of an int4 weight."""
    block, place = divmod(place, 32)
    byte = stored[16 * block + place % 16] if 16 * block + place % 16 < len(stored) else 0
    code = byte % 16 if place < 16 else byte // 16
    return code - 16 if is_signed and code > 7 else code


@pytest.mark.parametrize("form", FORMATS)
def test_the_matrix_is_what_the_storage_says(form: str) -> None:
    weight = stored_as(drawn(5, 64), form)
    expected = torch.tensor(decoded(weight), dtype=torch.float64).to(weight.dtype)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if weight.parts[2] is not None else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(weight.rows(), expected, **tolerance)
    expected = weight.rows()
    index = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(F.embedding(index, weight), expected[index])
    assert torch.equal(weight[1:3] + 0, expected[1:3])
    assert torch.equal(weight.t() @ torch.ones(5, dtype=weight.dtype), expected.t() @ torch.ones(5, dtype=weight.dtype))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("num_rows", "length"), [(1, 32), (7, 96), (50, 64), (131, 160)])
def test_products_agree_with_float64(form: str, num_rows: int, length: int) -> None:
    """Rows that fill tiles and rows that do not, on either side of the count where another kernel takes over."""
    weight = stored_as(drawn(num_rows, length), form)
    exact, bias = weight.rows().double(), drawn(num_rows, seed=1)
    for count in (1, 2, 3, 4, 5, 6, 13, 64, 67, 129):
        x = drawn(count, length, seed=count)
        is_ours = weight.kernel is not None and (count <= weight.most_native_rows or not weight.has_scales)
        for added in (None, bias):
            found = F.linear(x, weight, added).double()
            expected = F.linear(x.double(), exact, None if added is None else added.double())
            sizes, bias_sizes = x.double().abs() @ exact.abs().t(), 0.0 if added is None else added.double().abs()
            if is_ours:  # the bias is added last, which rounds once
                allowed = 1e-6 * sizes + UNIT * expected.abs()
            else:  # the sum of products and bias in any order (Higham 2002, equation 3.5)
                allowed = (length + 1) * UNIT / (1 - (length + 1) * UNIT) * (sizes + bias_sizes)
            if (
                weight.parts[1] is not None and weight.group is None
            ):  # the largest number of a row becomes 32767, others move
                steps = x.double().abs().amax(1, keepdim=True) / 32767
                allowed += steps / 2 * exact.abs().sum(1)
            assert ((found - expected).abs() <= allowed).all()


@needs_compiler
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", *INTEGERS])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(form: str) -> None:
    weight, x = stored_as(drawn(101, 96), form), drawn(70, 96, seed=3)
    together = F.linear(x, weight)
    for count in (1, 2, 3, 5, 8, 66):
        assert torch.equal(F.linear(x[5 : 5 + min(count, 65)], weight), together[5 : 5 + min(count, 65)])
    if weight.most_native_rows > 150:  # PyTorch multiplies more rows with groups on some processors
        x = drawn(150, 96, seed=4)
        assert torch.equal(F.linear(x[3:140], weight), F.linear(x, weight)[3:140])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for count in (4, 133) if weight.most_native_rows > 133 else (4,):
            x, weight = drawn(count, 1120, seed=5), stored_as(drawn(400, 1120), form)
            shared = F.linear(x, weight)
            torch.set_num_threads(1)
            assert torch.equal(F.linear(x, weight), shared)
            torch.set_num_threads(3)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", *INTEGERS])
def test_long_rows_agree_with_float64(form: str) -> None:
    """Rows longer than what a kernel sums at a time, and more inputs than it keeps sums of."""
    weight = stored_as(drawn(19, 4128), form)
    x = drawn(135, 4128, seed=3)
    exact = weight.rows().double()
    allowed = 1e-6 * x.double().abs() @ exact.abs().t()
    if weight.has_scales and weight.group is None:
        allowed += (x.double().abs().amax(1, keepdim=True) / 65534 * exact.square().sum(1).sqrt()) * 6 / 3**0.5
    assert ((F.linear(x, weight).double() - x.double() @ exact.t()).abs() <= allowed).all()


@needs_compiler
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4 in 32s with offsets"])
def test_sizes_that_do_not_fit_are_refused(form: str) -> None:
    """Before a kernel reads beyond the end of a tensor."""
    weight, x = stored_as(drawn(9, 64), form), drawn(2, 64)
    with pytest.raises(ValueError, match="x has rows of 32 numbers, the matrix of 64"):
        weight.product(x[:, :32])
    with pytest.raises(ValueError, match=r"bias must be contiguous, torch.float32 \(9,\) on the CPU"):
        weight.product(x, torch.zeros(8))
    numbers, *factors = weight._parts
    weight._parts = numbers[:0], *factors
    with pytest.raises(ValueError, match="numbers must be contiguous"):
        weight.product(x)
    if weight.parts[1] is not None:
        weight._parts = numbers, weight.parts[1][:1], None
        with pytest.raises(ValueError, match="scales must be contiguous"):
            weight.product(x)


@needs_compiler
@pytest.mark.parametrize("form", ["int8", "int4", "int4 in 16s with offsets", "int8 in 8s"])
@pytest.mark.parametrize("num_rows", [16, 31, 48])
def test_integers_in_tiles_are_the_rows_that_went_in(form: str, num_rows: int) -> None:
    """Arranged in a copy or in place; rows, parts of a matrix, and each expert's matrix are found again."""
    weight = stored_as(drawn(2, num_rows, 96), form)
    numbers, scales, offsets = (part if part is None else part.clone() for part in weight.parts)
    given, *others = (part if part is None else part.clone() for part in (numbers, scales, offsets))
    again = StoredWeight(weight.stored, given, others[0], torch.float32, others[1], in_place=True)
    for kept, part in zip(again.parts, (numbers, scales, offsets), strict=True):
        assert part is None if kept is None else torch.equal(kept, part)
    plain = stored_as(drawn(num_rows, 96), form)
    assert torch.equal(plain.rows(slice(5, 200)), plain.rows()[5:200])
    index = torch.tensor([[num_rows - 1], [0]])
    assert torch.equal(plain.rows(index), plain.rows()[index])
    assert plain.stored_bytes == sum(part.nbytes for part in plain.parts if part is not None) or num_rows % 16


@needs_compiler
def test_products_do_not_depend_on_the_width_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of AVX2 give what those of this processor do, to the last bit."""
    if "avx2" not in [level.name for level in levels()]:
        pytest.skip("this processor has no AVX2")
    weights = [stored_as(drawn(50, 96), form) for form in INTEGERS]
    x = drawn(5, 96, seed=3)
    expected = [F.linear(x, weight) for weight in weights]
    monkeypatch.setenv("SHEEPOP_NATIVE", "avx2")
    narrow = load_kernel.__wrapped__(stored_weight.SOURCE_OF_INTEGERS).library
    monkeypatch.setattr(stored_weight, "native_library", lambda source: narrow)
    for weight, wanted in zip(weights, expected, strict=True):
        stored_weight._kernel.cache_clear()
        assert weight.kernel is not None
        assert torch.equal(F.linear(x, weight), wanted)
    stored_weight._kernel.cache_clear()


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is an extension of x86-64")
def test_tiles_of_amx_give_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its instructions in software: int8 to the last bit, bfloat16 as exact as float32."""
    shapes = [(50, 48, 130), (33, 16, 129), (64, 1040, 17), (16, 80, 144)]  # rows, their length, rows of inputs
    integers = [quantized(drawn(rows, length), "int8") for rows, length, _ in shapes]
    halves = [stored_as(drawn(rows, length), "bfloat16").computing_in(torch.float32) for rows, length, _ in shapes]
    inputs = [(drawn(count, length, seed=3), drawn(rows, seed=4)) for rows, length, count in shapes]
    expected = [weight.product(*parts) for weight, parts in zip(integers, inputs, strict=True)]
    software = Path(__file__).parent / "amx_in_software.h"
    monkeypatch.setenv("SHEEPOP_NATIVE_FLAGS", f"-include {shlex.quote(str(software))} -O0")
    made = {source: load_kernel.__wrapped__(source).library for source in (INTEGERS_SOURCE, FLOATS_SOURCE)}
    monkeypatch.setattr(stored_weight, "native_library", made.__getitem__)
    stored_weight._kernel.cache_clear()
    assert stored_weight._kernel("bfloat16_many")[0], "the inputs of tiles are rounded"  # type: ignore[index]
    for weight, half, (x, bias), wanted in zip(integers, halves, inputs, expected, strict=True):
        assert torch.equal(weight.product(x, bias), wanted)
        exact = x.double() @ half.rows().double().t() + bias.double()
        sizes = x.double().abs() @ half.rows().double().abs().t() + bias.double().abs()
        assert ((half.product(x, bias) - exact).abs() <= 5e-7 * sizes).all()
    stored_weight._kernel.cache_clear()


@pytest.mark.skipif(
    not stored_weight.has_kernels() or stored_weight._kernel("bfloat16_rounded") is None,
    reason="this processor has no products of bfloat16",
)
def test_inputs_beside_bfloat16_are_rounded_to_it_and_summed_in_one_order() -> None:
    for num_rows, length in ((7, 96), (131, 160), (50, 1120)):
        weight = stored_as(drawn(num_rows, length), "bfloat16").computing_in(torch.float32)
        weight.wants_rounding = True
        x, bias = drawn(150, length, seed=3), drawn(num_rows, seed=1)
        x[2, 5] = math.nan
        together, rounded = F.linear(x, weight, bias), x.bfloat16().double()
        expected = F.linear(rounded, weight.rows().double(), bias.double())
        allowed = 1e-6 * (1 + rounded.abs() @ weight.rows().double().abs().t())
        assert together[2].isnan().all()
        others = [row for row in range(len(x)) if row != 2]
        assert ((together.double() - expected).abs() <= allowed)[others].all()
        for count in (1, 2, 5, 8, 11, 140):
            assert torch.equal(F.linear(x[5 : 5 + count], weight, bias), together[5 : 5 + count])
    uneven = stored_as(drawn(7, 48), "bfloat16").computing_in(torch.float32)
    uneven.wants_rounding = True
    assert not uneven.rounds_inputs  # lanes add pairs of columns: rows have a multiple of 32 numbers


@needs_compiler
def test_products_of_int8_are_exact_sums() -> None:
    """The kernel's result is the one of integer arithmetic, rounded once."""
    weight, x = quantized(drawn(9, 48), "int8"), drawn(3, 48, seed=2)
    tops = x.abs().amax(1, keepdim=True)
    codes = (x * (32767 / tops)).round().long()
    assert weight.parts[1] is not None
    totals = (codes @ weight.parts[0].long().t()).double()
    expected = totals * weight.parts[1].double() * (tops / 32767).double()
    assert torch.allclose(F.linear(x, weight).double(), expected, rtol=5e-7, atol=0)


@needs_compiler
@pytest.mark.parametrize("form", [form for form, (_, group, *_) in GROUPED.items() if group > 8])
def test_groups_multiply_small_inputs_beside_a_large_one(form: str) -> None:
    """A row of inputs has one power of two, below which there are 30 bits."""
    weight, x = stored_as(drawn(9, 96), form), drawn(2, 96, seed=2)
    x[1, 40] = 1000.0
    exact, offsets = weight.rows().double(), torch.zeros(9, 96, dtype=torch.float64)
    if (found := weight.parts[2]) is not None:
        assert weight.group is not None
        offsets = found.double().repeat_interleave(weight.group, 1)
    sizes = (exact - offsets).abs() + offsets.abs()
    errors = (F.linear(x, weight).double() - x.double() @ exact.t()).abs()
    assert (errors <= 2e-7 * x.double().abs() @ sizes.t()).all()


@needs_compiler
def test_no_total_overflows() -> None:
    """The largest inputs times the largest weights, in long rows."""
    for length in (4096, 16384, 65536):
        weight = quantized(torch.ones(2, length), "int8")
        assert F.linear(torch.ones(1, length), weight)[0, 0].item() == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_alone(form: str, spoiled: float) -> None:
    weight, x = stored_as(drawn(9, 32), form), drawn(6, 32, seed=4)
    expected = F.linear(x, weight)
    x[2, 7] = spoiled
    found = F.linear(x, weight)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "int4 in 16s with offsets"])
def test_experts_multiply_their_own_rows(form: str) -> None:
    """Forward and backward, with experts that have no rows; and all of them with none."""
    weight, x = stored_as(drawn(4, 24, 64), form), drawn(7, 64, seed=1).requires_grad_()
    assert tuple(weight.shape) == (4, 24, 64)
    ends, experts = torch.tensor([3, 3, 6, 7], dtype=torch.int32), torch.tensor([0, 0, 0, 2, 2, 2, 3])
    expected = torch.einsum("mk,mnk->mn", x.double(), weight.rows().double()[experts])
    found = grouped_product(x, weight, ends)
    with torch.no_grad():
        assert torch.allclose(grouped_product(x, weight, ends).double(), expected, atol=1e-2, rtol=0)
        assert grouped_product(x[:0], weight, torch.zeros(4, dtype=torch.int32)).shape == (0, 24)
    slope = drawn(7, 24, seed=2)
    (gradient,) = torch.autograd.grad(found, x, slope)
    assert torch.allclose(found.double(), expected, atol=1e-2, rtol=0)
    wanted = torch.einsum("mn,mnk->mk", slope.double(), weight.rows().double()[experts])
    assert torch.allclose(gradient.double(), wanted, atol=1e-4, rtol=0)


def test_products_keep_the_shape_and_type_of_what_goes_in() -> None:
    weight = quantized(drawn(6, 32), "int8")
    found = F.linear(drawn(2, 3, 32).to(torch.bfloat16), weight)
    assert (found.shape, found.dtype) == ((2, 3, 6), torch.bfloat16)
    assert F.linear(torch.empty(0, 32), weight).shape == (0, 6)
    assert F.linear(drawn(1, 32).double(), weight.to(torch.float64)).dtype == torch.float64


def test_a_stored_weight_cannot_be_changed() -> None:
    weight = quantized(drawn(6, 32), "int8")
    with pytest.raises(TypeError, match="is immutable"):
        weight.add_(1.0)
    assert isinstance(weight.detach(), StoredWeight)
    with torch.inference_mode():
        assert isinstance(weight.to(weight.dtype), StoredWeight)
    assert isinstance(torch.nn.Parameter(weight, requires_grad=False), StoredWeight)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("form", ["int8", "int4", "int4 in 32s with halves", "fp8"])
@pytest.mark.parametrize(("count", "length", "num_rows"), [(1, 64, 50), (3, 160, 32), (17, 96, 7)])
def test_products_on_a_gpu_are_those_of_the_storage(form: str, count: int, length: int, num_rows: int) -> None:
    """Without a GPU, Triton's interpreter runs the kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight, x, bias = stored_as(drawn(num_rows, length), form), drawn(count, length, seed=1), drawn(num_rows, seed=2)
    matrix = torch.tensor(decoded(weight), dtype=torch.float64)
    expected = x.double() @ matrix.T
    on_device = weight.to(device)
    assert isinstance(on_device, StoredWeight)
    for given, wanted in ((None, expected), (bias, expected + bias.double())):
        found = on_device.product_by_triton(x.to(device), None if given is None else given.to(device))
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    in_half = on_device.product_by_triton(x.half().to(device), None)
    assert in_half.dtype == torch.half
    torch.testing.assert_close(in_half.double().cpu(), expected, rtol=2e-3, atol=2e-3 * length**0.5)
