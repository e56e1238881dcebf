"""The learning rate of every step, against worked values and a slow reference."""

import math
from typing import get_args

import pytest

from sheepop.train import Schedule
from sheepop.train.schedule import ScheduleName


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.001), (2500, 0.000853553), (5000, 0.0005), (7500, 0.000146447), (10000, 0.0)]
)
def test_cosine_gives_the_worked_values(step: int, expected: float) -> None:
    schedule = Schedule("cosine", learning_rate=0.001, min_learning_rate=0.0, warmup_steps=0, total_steps=10000)
    assert schedule(step) == pytest.approx(expected, abs=1e-9)


def test_progress_of_the_decay_is_counted_after_warm_up() -> None:
    schedule = Schedule("cosine", 0.001, 0.0, warmup_steps=300, total_steps=10300)
    assert schedule(300 + 2500) == pytest.approx(0.000853553, abs=1e-9)


def test_warm_up_rises_by_equal_amounts_and_wastes_no_step() -> None:
    schedule = Schedule("cosine", 0.8, 0.0, warmup_steps=4, total_steps=100)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_every_decay_ends_at_the_minimum_except_constant() -> None:
    ends = {name: Schedule(name, 1.0, 0.1, 10, 110)(110) for name in ("cosine", "linear", "constant")}
    assert ends == pytest.approx({"cosine": 0.1, "linear": 0.1, "constant": 1.0})


def test_linear_is_a_straight_line() -> None:
    schedule = Schedule("linear", 1.0, 0.2, 0, 8)
    assert [schedule(step) for step in range(9)] == pytest.approx([1.0 - 0.1 * step for step in range(9)])


def test_cosine_equals_the_formula_at_every_step() -> None:
    schedule = Schedule("cosine", 3e-3, 1e-4, 7, 57)
    for step in range(7, 57):
        expected = 1e-4 + (3e-3 - 1e-4) * 0.5 * (1 + math.cos(math.pi * (step - 7) / 50))
        assert schedule(step) == pytest.approx(expected)


def warmed_up(step: int, warmup: int) -> float:
    return 2e-3 * (step + 1) / warmup


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_warmup_stable_decay_is_flat_until_its_decay(warmup: int) -> None:
    schedule = Schedule("wsd", 2e-3, 1e-4, warmup, 50, decay_steps=16)
    for step in range(51):
        expected = warmed_up(step, warmup) if step < warmup else 2e-3
        if step > 34:  # the decay begins at step 50 - 16
            expected = 1e-4 + (2e-3 - 1e-4) * (1 - math.sqrt((step - 34) / 16))
        assert schedule(step) == pytest.approx(expected), step


def test_warmup_stable_decay_gives_the_worked_values() -> None:
    schedule = Schedule("wsd", 1.0, 0.0, 0, 100, decay_steps=20)
    found = [schedule(step) for step in (0, 80, 85, 100)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.0])  # after a quarter of the decay its root, one half, is gone


@pytest.mark.parametrize("warmup", [1, 9])
def test_inverse_square_root_is_that_of_the_transformer(warmup: int) -> None:
    """Vaswani et al. 2017, equation 3, up to its factor: ``min(t^-0.5, t W^-1.5)`` with steps t from 1."""
    schedule = Schedule("inverse_sqrt", 2e-3, 0.0, warmup, 400)
    scale = 2e-3 * warmup**0.5
    for step in range(400):
        t = step + 1
        assert schedule(step) == pytest.approx(scale * min(t**-0.5, t * warmup**-1.5)), step


def test_the_minimum_is_what_inverse_square_root_tends_to() -> None:
    assert Schedule("inverse_sqrt", 1.0, 0.2, 4, 100)(99) == pytest.approx(0.2 + 0.8 * math.sqrt(4 / 100))


@pytest.mark.parametrize("points", [[(0, 0.5)], [(3, 0.1), (10, 1.0)], [(0, 0.0), (4, 1.0), (5, 0.25), (20, 0.75)]])
def test_piecewise_is_straight_between_its_points(points: list[tuple[int, float]]) -> None:
    schedule = Schedule("piecewise", 2e-3, 0.0, 0, 30, points=points)
    for step in range(30):
        before = [point for point in points if point[0] <= step]
        after = [point for point in points if point[0] > step]
        if not before or not after:
            factor = points[0][1] if not before else points[-1][1]
        else:
            (s, f), (e, g) = before[-1], after[0]
            factor = f + (g - f) * (step - s) / (e - s)
        assert schedule(step) == pytest.approx(2e-3 * factor), step


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_no_rate_is_outside_of_its_bounds(name: str) -> None:
    schedule = Schedule(name, 2e-3, 0.0, 0, 50, decay_steps=10, points=[(0, 1.0), (40, 0.0)])
    assert all(0 <= schedule(step) <= 2e-3 for step in range(60))
