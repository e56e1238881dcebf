"""Scores of tasks over sizes or steps, and whether a jump of a metric is a jump of the models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sheepop.report.figures import blank_figure, finish_axes, label_few_powers
from sheepop.report.palette import RUNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULT, PICTURE = "emergence.json", "emergence.png"
_JUMP = 0.5  # of the whole change, between two neighbouring models
_LEAST_CHANGE = 0.1  # of the accuracy; a smaller change is noise


@dataclass(frozen=True)
class Point:
    """A model's scores on a task: `flops` of its training, accuracy, and bits of the right answer among the choices."""

    model: str
    flops: float
    accuracy: float
    bits: float


@dataclass(frozen=True)
class TaskCourse:
    """The scores of one task, by operations of training."""

    task: str
    points: tuple[Point, ...]

    @property
    def jumps(self) -> tuple[float, float]:
        """The largest rise of the accuracy, and the largest fall of the bits, between neighbours.

        Each is a share of the whole change from the first to the last model; 0 without a change for the better.
        """
        accuracies = [point.accuracy for point in self.points]
        return _largest_share(accuracies), _largest_share([-point.bits for point in self.points])

    @property
    def verdict(self) -> str:
        """What jumps: the models, the metric only, or nothing.

        An accuracy may jump where the probability of the right answer rises evenly (Schaeffer et al. 2023, arXiv
        2304.15004).
        """
        whole = self.points[-1].accuracy - self.points[0].accuracy if self.points else 0.0
        of_accuracy, of_bits = self.jumps
        if len(self.points) < 3 or whole < _LEAST_CHANGE or of_accuracy <= _JUMP:
            return "no jump"
        return "the models jump" if of_bits > _JUMP else "only the accuracy jumps"

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as plain data."""
        of_accuracy, of_bits = self.jumps
        return {
            "task": self.task,
            "verdict": self.verdict,
            "largest_step": {"accuracy": of_accuracy, "bits_of_the_answer": of_bits},
            "points": [asdict(point) for point in self.points],
        }


def _largest_share(values: Sequence[float]) -> float:
    """The largest rise between neighbours, as a share of the rise from the first to the last value."""
    if len(values) < 2 or values[-1] <= values[0]:
        return 0.0
    return max(after - before for before, after in itertools.pairwise(values)) / (values[-1] - values[0])


def emergence_figure(courses: Sequence[TaskCourse]) -> Figure:
    """Two panels by operations of training: accuracy, and bits of the right answer; a line for each task."""
    figure = blank_figure(11, 4.4, 1, 2)
    left, right = figure.subplots(1, 2)
    for place, course in enumerate(courses):
        color, flops = RUNS[place % len(RUNS)], [point.flops for point in course.points]
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.5}
        left.plot(flops, [point.accuracy for point in course.points], label=f"{course.task}: {course.verdict}", **style)
        right.plot(flops, [point.bits for point in course.points], label=course.task, **style)
    for axes, title in ((left, "Accuracy"), (right, "Bits of the right answer among the choices")):
        label_few_powers(axes)
        finish_axes(axes, title, "Operations of training", has_legend=False)
        if courses:
            for text in axes.legend(frameon=False, fontsize=8).get_texts():
                text.set_parse_math(False)
    left.set_ylim(0, 1)
    return figure
