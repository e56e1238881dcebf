"""Products whose inputs are rounded to 8 bits beside integers: sums of integers, the same on every processor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.adapt import stored_weight
from sheepop.adapt.quantization import quantized
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.adapt.tiles import unpacked_int4
from sheepop.core.native import levels, load_kernel
from sheepop.model.experts.grouped_product import grouped_product

from .test_stored_weight import INTEGERS, drawn, stored_as


def rounding(weight: StoredWeight) -> StoredWeight:
    """The same matrix with rounded inputs; skips a test where no kernel rounds them."""
    weight.wants_rounding = True
    if not weight.rounds_inputs:
        pytest.skip("this processor has no faster kernel with rounded inputs for this format")
    return weight


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers (M, groups, 32) and the scales (M, groups) of inputs: the largest of 32 neighbours becomes 127.

    Columns beyond the last are 0. Numbers are rounded as if the largest were at least 1e-28.
    """
    groups = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    sizes = groups.abs().amax(-1, keepdim=True).clamp(min=1e-28)
    factors = torch.tensor(127.0).div(sizes)
    return (groups.double() * factors.double()).round().long(), (sizes * (torch.tensor(1.0) / (127 * 2**20)))[..., 0]


def inputs_of(x: Tensor) -> Tensor:
    """The inputs that products see, in float64."""
    integers, scales = rounded(x)
    return (integers * scales.double()[..., None] * 2**20).flatten(-2)[..., : x.shape[-1]]


def singles(x: Tensor) -> Tensor:
    """The nearest numbers in float32."""
    return x.float().double()


def in_order(weight: StoredWeight, x: Tensor) -> Tensor:
    """Products as `rounded_integers.cpp` describes them: exact sums of integers, then sums in float32, in one order."""
    codes, scales, offsets = weight.parts
    assert scales is not None
    if weight.stored == "int4":
        codes = unpacked_int4(codes, is_signed=offsets is None)
    integers, of_inputs = rounded(x)
    length, group = weight.row_length, weight.group or 32
    codes, integers = F.pad(codes.long(), (0, -length % 32)), integers.flatten(1)
    total = torch.zeros(len(x), weight.num_rows, dtype=torch.float64)
    for number in range(of_inputs.shape[1]):
        found = torch.zeros_like(total)
        for begin in range(32 * number, min(32 * number + 32, length), group):
            place = slice(begin, begin + group)
            part = (integers[:, place] @ codes[:, place].T).double()
            if weight.group:
                part = singles(part * scales[:, begin // group].double())
            if offsets is not None:
                sums = integers[:, place].sum(1, keepdim=True)
                part = singles(part + singles(sums * offsets[:, begin // group].double()))
            found = singles(found + part)
        total = singles(total + found * of_inputs[:, number, None].double())  # rounded once
    return ((total if weight.group else singles(total * scales.double())) * 2**20).float()


@pytest.mark.parametrize("form", INTEGERS)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 70), units=st.integers(1, 7), count=st.integers(1, 40), power=st.integers(-45, 34),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_products_are_exact_sums(form: str, rows: int, units: int, count: int, power: int, seed: int) -> None:
    """To the last bit, for any sizes, and for inputs that are tiny, huge, 0, or beside a large one."""
    unit = 16 if form in ("int8", "int8 in 16s", "int8 in 16s with offsets") else 32
    weight = rounding(stored_as(drawn(rows, unit * units), form))
    x = drawn(count, weight.row_length, seed=seed) * 10.0**power
    x[0, seed % 7 :: 7] = 0.0
    x[-1, seed % weight.row_length] *= 1000.0
    assert torch.equal(F.linear(x, weight), in_order(weight, x))


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize(("num_rows", "length"), [(1, 32), (50, 64), (131, 160), (19, 4128)])
def test_products_agree_with_float64(form: str, num_rows: int, length: int) -> None:
    """Those of the rounded inputs; the inputs are at most half a step of their group away."""
    weight, bias = rounding(stored_as(drawn(num_rows, length), form)), drawn(num_rows, seed=1)
    exact = weight.rows().double()
    for count in (1, 5, 13, 67, 129):
        x = drawn(count, length, seed=count)
        seen = inputs_of(x)
        steps = F.pad(x, (0, -length % 32)).unflatten(1, (-1, 32)).abs().amax(-1) / 127
        assert ((seen - x).abs() <= 0.5001 * steps.repeat_interleave(32, 1)[:, :length]).all()
        for added in (None, bias):
            found = F.linear(x, weight, added).double()
            expected = F.linear(seen, exact, None if added is None else added.double())
            assert ((found - expected).abs() <= 1e-6 * (1 + seen.abs() @ exact.abs().t())).all()


@pytest.mark.parametrize("form", INTEGERS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(form: str) -> None:
    weight, x = rounding(stored_as(drawn(101, 96), form)), drawn(150, 96, seed=3)
    together = F.linear(x, weight)
    for count in (1, 2, 3, 5, 8, 66, 137):
        assert torch.equal(F.linear(x[5 : 5 + count], weight), together[5 : 5 + count])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x, weight = drawn(133, 1120, seed=5), rounding(stored_as(drawn(400, 1120), form))
        shared = F.linear(x, weight)
        torch.set_num_threads(1)
        assert torch.equal(F.linear(x, weight), shared)
    finally:
        torch.set_num_threads(threads)


def test_products_do_not_depend_on_the_width_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of AVX2 and of AVX-512 without VNNI give what those of this processor do, to the last bit."""
    others = {level.name for level in levels()} & {"avx2", "avx512"}
    weights = [rounding(stored_as(drawn(50, 96), form)) for form in INTEGERS if form != "int8"]
    x = drawn(5, 96, seed=3)
    expected = [F.linear(x, weight) for weight in weights]
    for name in others:
        monkeypatch.setenv("SHEEPOP_NATIVE", name)
        library = load_kernel.__wrapped__(stored_weight._ROUNDED_INTEGERS).library
        assert not hasattr(library, "multiply_int8_rounded"), "exact products of whole rows are faster there"
        monkeypatch.setattr(stored_weight, "native_library", lambda source, library=library: library)
        stored_weight._kernel.cache_clear()
        for weight, wanted in zip(weights, expected, strict=True):
            again = weight.computing_in(weight.dtype)  # which has no description of its product yet
            assert again.rounds_inputs
            assert torch.equal(F.linear(x, again), wanted)
    stored_weight._kernel.cache_clear()


@pytest.mark.parametrize("form", ["int8", "int4 in 32s with offsets"])
def test_large_results_are_those_of_small_ones(form: str) -> None:
    """Where the results of many rows pass the caches by."""
    weight, x = rounding(stored_as(drawn(2**16, 32), form)), drawn(65, 32, seed=3)
    assert torch.equal(F.linear(x, weight)[:9], F.linear(x[:9], weight))


@pytest.mark.parametrize("length", [4096, 65536])
def test_no_total_overflows(length: int) -> None:
    """The largest inputs times the largest weights, in long rows."""
    weight = rounding(quantized(torch.ones(2, length), "int8"))
    assert F.linear(torch.ones(1, length), weight)[0, 0].item() == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_alone(form: str, spoiled: float) -> None:
    weight, x = rounding(stored_as(drawn(9, 32), form)), drawn(6, 32, seed=4)
    expected = F.linear(x, weight)
    x[2, 7] = spoiled
    found = F.linear(x, weight)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_copies_and_experts_round_too() -> None:
    weight, x = rounding(stored_as(drawn(4, 24, 64), "int4 in 16s with offsets")), drawn(7, 64, seed=1)
    for copy in (weight.detach(), torch.nn.Parameter(weight, requires_grad=False), weight.computing_in(torch.float64)):
        assert copy.rounds_inputs
    ends, experts = torch.tensor([3, 3, 6, 7], dtype=torch.int32), torch.tensor([0, 0, 0, 2, 2, 2, 3])
    expected = torch.einsum("mk,mnk->mn", inputs_of(x), weight.rows().double()[experts])
    assert torch.allclose(grouped_product(x, weight, ends).double(), expected, atol=1e-5, rtol=0)


def test_without_a_kernel_products_are_exact() -> None:
    """Of floats, of integers whose rows no kernel reads, and in float64."""
    x = drawn(3, 40, seed=1)
    for weight in (stored_as(drawn(5, 40), "float32"), stored_as(drawn(5, 40), "int8")):
        weight.wants_rounding = True
        assert not weight.rounds_inputs
        assert torch.allclose(F.linear(x, weight), x @ weight.rows().t(), atol=1e-5)
