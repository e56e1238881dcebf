"""A jump of a metric is told from a jump of the models, by curves whose answers are known."""

from __future__ import annotations

import math

import pytest

from sheepop.scale.emergence import Point, TaskCourse, emergence_figure


def course(probabilities: list[float], tokens: int) -> TaskCourse:
    """Models of 10, 100, ... operations that get each token of the answer right with these probabilities.

    All tokens must be right for the answer to count (Schaeffer et al. 2023, section 2).
    """
    points = [
        Point(f"m{place}", 10.0**place, p**tokens, -math.log2(p)) for place, p in enumerate(probabilities, start=1)
    ]
    return TaskCourse("sums", tuple(points))


def test_an_even_rise_of_the_probability_is_a_jump_of_the_accuracy_only():
    bits = [3.0, 2.25, 1.5, 0.75, 0.01]
    found = course([2**-each for each in bits], tokens=5)
    assert found.verdict == "only the accuracy jumps"
    assert found.jumps[1] == pytest.approx(0.75 / 2.99)


def test_a_jump_of_the_probability_is_a_jump_of_the_models():
    assert course([0.25, 0.26, 0.27, 0.97, 0.98], tokens=1).verdict == "the models jump"


@pytest.mark.parametrize("probabilities", [[0.3, 0.3], [0.2, 0.4, 0.6, 0.8], [0.8, 0.5, 0.2], [0.3, 0.3, 0.35]])
def test_even_small_or_falling_courses_have_no_jump(probabilities: list[float]):
    assert course(probabilities, tokens=1).verdict == "no jump"


def test_the_figure_shows_both_measures():
    left, right = emergence_figure([course([0.2, 0.5, 0.9], 1)]).axes
    assert list(left.lines[0].get_ydata()) == [0.2, 0.5, 0.9]
    assert list(right.lines[0].get_ydata()) == pytest.approx([-math.log2(p) for p in (0.2, 0.5, 0.9)])
