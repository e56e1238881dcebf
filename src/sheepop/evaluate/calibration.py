"""Whether a model is as sure as it may be: how often it is right when it gives a probability."""

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
    """Answers with a confidence from `low` to `high`: how many, how sure on average, and what share was right."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """The expected calibration error, and the bins that it is computed from."""

    ece: float
    bins: tuple[Bin, ...]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Reliability:
        """What `dataclasses.asdict` gave."""
        return cls(found["ece"], tuple(Bin(**each) for each in found["bins"]))


def reliability(confidences: Sequence[float], right: Sequence[bool], bins: int = 10) -> Reliability:
    """The mean distance of confidence and accuracy over `bins` of equal width, weighted by their answers.

    After Guo et al. 2017, equation 3. A confidence of 1 falls into the last bin. Raises `ValueError` for no answers and
    for confidences outside of 0 to 1.
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
    """Bars of accuracy by confidence beside the line of equality, and below them how many answers each bin has."""
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
