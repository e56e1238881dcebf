from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.random import Permutation, derive_seed, derive_seeds, numpy_generator, seed_torch, torch_generator

sizes = st.one_of(st.integers(1, 300), st.integers(4_000, 20_000))


@given(size=sizes, key=st.integers(0, 2**63 - 1))
def test_a_permutation_visits_every_index_once(size: int, key: int):
    assert np.array_equal(np.sort(Permutation(size, key)(np.arange(size))), np.arange(size))


@given(size=st.integers(1, 2**62), key=st.integers(0, 2**63 - 1), data=st.data())
def test_an_index_maps_alike_alone_and_in_any_company(size: int, key: int, data: st.DataObject):
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    permutation = Permutation(size, key)
    together = permutation(np.array(indices, dtype=np.int64))
    assert together.tolist() == [permutation[index] for index in indices]
    assert np.array_equal(permutation(np.array(indices[::-1], dtype=np.int64)), together[::-1])
    assert all(0 <= value < size for value in together)
    assert len(set(together.tolist())) == len(set(indices))


def test_a_permutation_keeps_the_shape_and_is_the_same_when_made_again():
    grid = np.arange(6_000).reshape(2, 3, 1_000)
    assert np.array_equal(Permutation(6_000, 7)(grid), Permutation(6_000, 7)(grid.ravel()).reshape(2, 3, 1_000))
    assert Permutation(9, 1)(np.array([], dtype=np.int64)).shape == (0,)


def test_another_key_gives_another_order():
    orders = {tuple(Permutation(5_000, key)(np.arange(20)).tolist()) for key in range(50)}
    assert len(orders) == 50


@pytest.mark.parametrize("size", [3, 5_000])
@pytest.mark.parametrize("index", [-1, "size"])
def test_an_index_outside_the_range_is_refused(size: int, index: int | str):
    with pytest.raises(IndexError, match=f"out of range for a permutation of {size}"):
        Permutation(size, 0)(np.array([size if index == "size" else index]))


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, 0)


def chi_square(counts: np.ndarray) -> float:
    """Deviation from uniform in standard deviations of the chi-square statistic."""
    freedom = counts.size - 1
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_every_order_of_a_few_samples_is_equally_likely():
    orders = Counter(tuple(Permutation(5, key)(np.arange(5)).tolist()) for key in range(12_000))
    counts = np.array([orders[order] for order in itertools.permutations(range(5))])
    assert abs(chi_square(counts)) < 3


@pytest.mark.parametrize("size", [64, 4_097, 10_000])
def test_every_place_is_equally_likely(size: int):
    places = np.concatenate([Permutation(size, key)(np.arange(16)) for key in range(800)])
    assert abs(chi_square(np.bincount(places * 64 // size, minlength=64))) < 3


def test_neighbours_are_not_related():
    order = Permutation(20_000, 3)(np.arange(20_000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03


def test_purposes_that_could_be_confused_have_different_seeds():
    purposes: list[tuple[str | int, ...]] = [
        (),
        ("a",),
        ("a", "b"),
        ("ab",),
        ("a", 1),
        ("a", "1"),
        ("a1",),
        (1, "a"),
        ("a', 'b",),
        ("a", 1, 2),
        ("a", 12),
    ]
    seeds = [derive_seed(seed, *purpose) for seed in (0, 1, -1, 2**70) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_blake2_of_the_purpose():
    # printf "(1, 'dropout', 2)" | b2sum -l 64, read as a little-endian number and halved
    assert derive_seed(0) == 2_631_537_505_891_389_924
    assert derive_seed(1, "dropout", 2) == 110_086_976_350_073_615


def test_a_numpy_integer_is_the_integer():
    assert derive_seed(np.int64(3), "x", np.int32(5)) == derive_seed(3, "x", 5)


def test_generators_of_one_purpose_agree_and_of_two_do_not():
    def draw(purpose: str) -> list[float]:
        return numpy_generator(1, purpose).random(4).tolist()

    assert draw("a") == draw("a")
    assert draw("a") != draw("b")


def test_torch_draws_from_the_derived_seed():
    import torch

    expected = torch.Generator().manual_seed(derive_seed(5, "sample", 2))
    drawn = torch.rand(4, generator=torch_generator(5, "sample", 2))
    assert torch.equal(drawn, torch.rand(4, generator=expected))
    seed_torch(5, "sample", 2)
    assert torch.equal(torch.rand(4), drawn)


def test_many_seeds_are_those_derived_one_by_one() -> None:
    seeds, indices = [0, 7, 2**63 - 1, 12345], [3, 0, 10**9, 41]
    expected = [derive_seed(seed, "token", index) for seed, index in zip(seeds, indices, strict=True)]
    assert derive_seeds(seeds, "token", indices) == expected
