from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sheepop.data import Stages
from sheepop.data.batch_schedule import Knots, MixtureSchedule, first_empty_step

# Shares are rounded to floats, so a target that is a whole number in truth may be off by so much.
ROUNDING = 1e-9
knots = st.dictionaries(st.integers(0, 25), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7]), min_size=1, max_size=4).map(
    lambda points: tuple(sorted(points.items()))
)
mixtures = st.lists(knots, min_size=1, max_size=6)
sizes = st.builds(
    lambda untils, values, final: Stages(tuple(zip(sorted(untils), values, strict=False)), final),
    st.sets(st.integers(1, 20), max_size=3),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.integers(1, 6),
)


def weight(points: Knots, step: int) -> Fraction:
    """The height at `step` of the line through the points, level outside of them."""
    before = [point for point in points if point[0] <= step]
    after = [point for point in points if point[0] > step]
    if not before or not after:
        return Fraction((before[-1] if before else after[0])[1])
    (left, low), (right, high) = before[-1], after[0]
    return Fraction(low) + (Fraction(high) - Fraction(low)) * Fraction(step - left, right - left)


@given(mixtures, sizes)
def test_at_every_step_each_source_is_within_a_row_of_its_target(mixture: list[Knots], sizes: Stages) -> None:
    assume(first_empty_step(mixture) is None)
    schedule = MixtureSchedule(mixture, sizes)
    targets, before = [Fraction(0)] * len(mixture), [0] * len(mixture)
    for step in range(45):
        taken = schedule.taken(step)
        assert sum(taken) == sizes.total(step)
        assert all(now >= earlier for now, earlier in zip(taken, before, strict=True))
        assert all(abs(now - target) <= 1 + ROUNDING for now, target in zip(taken, targets, strict=True))
        weights = [weight(points, step) for points in mixture]
        targets = [t + sizes.at(step) * w / sum(weights) for t, w in zip(targets, weights, strict=True)]
        before = taken


@given(mixtures, sizes, st.lists(st.integers(0, 50), max_size=4))
def test_what_was_asked_before_does_not_matter(mixture: list[Knots], sizes: Stages, steps: list[int]) -> None:
    assume(first_empty_step(mixture) is None)
    in_order, asked = MixtureSchedule(mixture, sizes), MixtureSchedule(mixture, sizes)
    table = [in_order.taken(step) for step in range(51)]
    assert [asked.taken(step) for step in steps] == [table[step] for step in steps]


def test_by_hand() -> None:
    # Shares 1/4 and 3/4 of four rows, and after a change over two steps 3/4 and 1/4.
    schedule = MixtureSchedule([[(0, 1.0), (2, 1.0), (4, 3.0)], [(0, 3.0), (2, 3.0), (4, 1.0)]], Stages((), 4))
    assert [schedule.taken(step) for step in range(7)] == [[0, 0], [1, 3], [2, 6], [3, 9], [5, 11], [8, 12], [11, 13]]


def test_a_source_of_weight_zero_gives_no_row() -> None:
    schedule = MixtureSchedule([[(0, 1.0)], [(0, 0.0), (10, 0.0), (20, 1.0)]], Stages((), 8))
    assert [schedule.taken(step)[1] for step in (1, 10, 11)] == [0, 0, 0]
    assert schedule.taken(30)[1] > 0


def test_a_step_that_no_source_has_a_weight_for_is_found() -> None:
    assert first_empty_step([[(0, 1.0), (5, 0.0)], [(5, 0.0), (9, 1.0)]]) == 5
    assert first_empty_step([[(0, 1.0), (5, 0.0)], [(3, 0.0), (4, 1.0)]]) is None
    with pytest.raises(ValueError, match="all weights are 0 at step 5"):
        MixtureSchedule([[(0, 1.0), (5, 0.0)]], Stages((), 2))
