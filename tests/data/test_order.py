from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.random import Permutation, derive_seed
from sheepop.data import SampleOrder


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 3))
def test_every_epoch_sees_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    indices = SampleOrder(num_samples, seed).indices(epoch * num_samples, num_samples)
    assert sorted(indices.tolist()) == list(range(num_samples))


@given(st.integers(1, 50), st.integers(0, 100), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_pieces_make_the_whole(num_samples: int, start: int, counts: list[int]) -> None:
    order = SampleOrder(num_samples, seed=3)
    pieces, place = [], start
    for count in counts:
        pieces += order.indices(place, count).tolist()
        place += count
    assert pieces == order.indices(start, sum(counts)).tolist()


def test_the_order_is_the_keyed_permutation() -> None:
    expected = [Permutation(10, derive_seed(5, "data order", 2))[i] for i in range(10)]
    assert SampleOrder(10, 5).indices(20, 10).tolist() == expected


def test_epochs_and_seeds_differ() -> None:
    first = SampleOrder(1000, 1).indices(0, 2000)
    assert not np.array_equal(first[:1000], first[1000:])
    assert not np.array_equal(first[:1000], SampleOrder(1000, 2).indices(0, 1000))


def test_a_billion_samples_need_no_table() -> None:
    order = SampleOrder(10**12, 0)
    assert len(set(order.indices(10**12 - 500, 1000).tolist())) >= 999


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SampleOrder(0, 1)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(3, 1).indices(-1, 2)
