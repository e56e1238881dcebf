from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.random import Permutation, derive_seed
from sheepop.data import SampleOrder
from sheepop.data.batch_schedule import EasyToHardOrder


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


scores = st.lists(st.floats(0, 3), min_size=1, max_size=40).map(np.array)


@given(scores, st.integers(0, 9), st.floats(0, 1), st.integers(0, 3))
def test_every_epoch_from_easy_to_hard_sees_every_sample_once(
    difficulty: np.ndarray, seed: int, jitter: float, epoch: int
) -> None:
    order = EasyToHardOrder(difficulty, seed, epochs=2, jitter=jitter)
    size = len(difficulty)
    assert sorted(order.indices(epoch * size, size).tolist()) == list(range(size))
    if epoch >= 2:
        assert (
            order.indices(epoch * size, size).tolist() == SampleOrder(size, seed).indices(epoch * size, size).tolist()
        )


@given(scores, st.integers(0, 100), st.integers(0, 60), st.data())
def test_places_from_easy_to_hard_do_not_depend_on_what_was_asked(
    difficulty: np.ndarray, start: int, count: int, data: st.DataObject
) -> None:
    order = EasyToHardOrder(difficulty, 1, epochs=2, jitter=0.3)
    cut = data.draw(st.integers(0, count))
    pieces = [*order.indices(start + cut, count - cut).tolist(), *order.indices(start, cut).tolist()]
    fresh = EasyToHardOrder(difficulty, 1, epochs=2, jitter=0.3).indices(start, count).tolist()
    assert pieces == fresh[cut:] + fresh[:cut]


def test_without_jitter_the_scores_rise_and_ties_are_in_random_order() -> None:
    difficulty = np.array([2.0, 0.0, 1.0] * 50)
    chosen = EasyToHardOrder(difficulty, 3, epochs=1, jitter=0.0).indices(0, 150)
    assert difficulty[chosen].tolist() == [0.0] * 50 + [1.0] * 50 + [2.0] * 50
    assert chosen[:50].tolist() != sorted(chosen[:50].tolist())
    assert chosen.tolist() != EasyToHardOrder(difficulty, 4, epochs=1, jitter=0.0).indices(0, 150).tolist()


def test_jitter_moves_a_sample_by_at_most_that_share_of_an_epoch() -> None:
    size, jitter = 1000, 0.2
    order = EasyToHardOrder(np.arange(float(size)), 3, epochs=2, jitter=jitter)
    first, second = order.indices(0, size), order.indices(size, size)
    for chosen in (first, second):
        moved = np.abs(chosen - np.arange(size))
        assert 0 < moved.max() <= jitter * size
    assert first.tolist() != second.tolist()
