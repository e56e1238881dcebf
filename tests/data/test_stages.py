from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import Stages

stages = st.builds(
    lambda steps, values, final: Stages(tuple(zip(accumulate(steps), values, strict=False)), final),
    st.lists(st.integers(1, 6), max_size=4),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(1, 9),
)


def test_by_hand() -> None:
    sizes = Stages(((2, 4), (5, 8)), 16)
    assert [sizes.at(step) for step in range(7)] == [4, 4, 8, 8, 8, 16, 16]
    assert [sizes.total(steps) for steps in range(8)] == [0, 4, 8, 16, 24, 32, 48, 64]
    assert [sizes.steps_to(total) for total in (0, 0.5, 4, 5, 8, 9, 32, 33, 64)] == [0, 1, 1, 2, 2, 3, 5, 6, 7]


@given(stages, st.integers(0, 40))
def test_sums_in_closed_form_are_those_of_a_loop(sizes: Stages, steps: int) -> None:
    values = [sizes.at(step) for step in range(steps)]
    assert sizes.total(steps) == sum(values)


@given(stages, st.floats(0, 200))
def test_the_fewest_steps_are_those_of_a_loop(sizes: Stages, total: float) -> None:
    steps = 0
    while sizes.total(steps) < total:
        steps += 1
    assert sizes.steps_to(total) == steps


@pytest.mark.parametrize("bad", [((3, 1), (3, 2)), ((5, 1), (2, 2)), ((0, 1),), ((1, 0),)])
def test_stages_that_make_no_sense_are_refused(bad: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"must increase|at least 1"):
        Stages(bad, 4)
