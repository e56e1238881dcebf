"""Calibration: whether a model is right as often as its probabilities say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sheepop.report.figures import blank_figure
from sheepop.report.palette import NEUTRAL, SCORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Bin:
    """Answers with a confidence from `low` to `high`: their number, mean confidence and share of right ones."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """The expected calibration error and its bins."""

    ece: float
    bins: tuple[Bin, ...]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Reliability:
        """Reads the output of `dataclasses.asdict`."""
        return cls(found["ece"], tuple(Bin(**each) for each in found["bins"]))


def reliability(confidences: Sequence[float], right: Sequence[bool], bins: int = 10) -> Reliability:
    """The mean distance between confidence and accuracy over `bins` of equal width, weighted by their answers.

    Guo et al. 2017, equation 3; a confidence of 1 is in the last bin. Raises `ValueError` for no answers, and for
    confidences outside of 0 to 1.
    """
    sure, correct = np.asarray(confidences, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if sure.size != correct.size or not sure.size:
        raise ValueError(f"{sure.size} confidences do not fit {correct.size} answers")
    if not ((sure >= 0) & (sure <= 1)).all():
        raise ValueError("a confidence is a probability from 0 to 1")
    where = np.minimum((sure * bins).astype(int), bins - 1)
    found, error = [], 0.0
    for number in range(bins):
        inside = where == number
        count = int(inside.sum())
        mean, share = (float(sure[inside].mean()), float(correct[inside].mean())) if count else (None, None)
        found.append(Bin(number / bins, (number + 1) / bins, count, mean, share))
        if mean is not None and share is not None:
            error += count / sure.size * abs(mean - share)
    return Reliability(error, tuple(found))


def reliability_figure(found: Reliability) -> Figure:
    """Bars of accuracy by confidence with the line of equality, above bars of the number of answers."""
    figure = blank_figure(5.2, 5.4, 2, 1, has_y_labels=True)
    above, below = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
    middles = [(each.low + each.high) / 2 for each in found.bins]
    width = 0.92 / len(found.bins)
    above.bar(middles, [each.accuracy or 0.0 for each in found.bins], width, color=SCORE)
    above.plot([0, 1], [0, 1], color=NEUTRAL, linestyle="--", linewidth=1.2)
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="Share that was right")
    above.set_title(f"Calibration error {found.ece:.3f}", loc="left", fontsize=11)
    below.bar(middles, [each.count for each in found.bins], width, color=NEUTRAL)
    below.set(xlabel="Probability that the model gave", ylabel="Answers")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure
