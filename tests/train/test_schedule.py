"""The learning rate of every step, against worked values and a slow reference."""

import math

import pytest

from sheepop.train import Schedule


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
