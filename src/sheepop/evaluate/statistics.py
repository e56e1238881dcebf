"""Confidence intervals, significance tests, calibration, and the logistic regression behind rankings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sheepop.core.random import numpy_generator

RESAMPLES = 2000
_Z = 1.959963984540054  # the 97.5 percent point of the normal distribution
_STEPS, _TOLERANCE, _LONGEST_STEP = 200, 1e-10, 2.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A difference over `count` items, its 95 percent interval, and its two-sided p value."""

    value: float
    interval: tuple[float, float]
    p: float
    count: int


def bootstrap(statistic: Callable[[Floats], Floats], count: int, seed: int, purpose: str, resamples: int) -> Floats:
    """The values of a statistic in samples of `count` clusters drawn with replacement (Efron 1979).

    `statistic` gets how often each cluster is in a sample, shape (count,); returns its values, shape (resamples, ...).
    """
    draw = numpy_generator(seed, purpose)
    drawn = (np.bincount(draw.integers(0, count, count), minlength=count) for _ in range(resamples))
    return np.stack([statistic(times.astype(np.float64)) for times in drawn])


def logistic_regression(features: Floats, shares: Floats, weights: Floats, penalty: Floats) -> Floats:
    """The coefficients b that maximise the weighted log-likelihood minus b' `penalty` b / 2, by Newton's method.

    `features` (N, P), `shares` of successes from 0 to 1 (N,), `weights` (N,), `penalty` (P, P); returns (P,).
    """
    found = np.zeros(features.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-features @ found))
        gradient = features.T @ (weights * (shares - chance)) - penalty @ found
        curvature = (features.T * (weights * chance * (1 - chance))) @ features + penalty
        step = np.clip(np.linalg.solve(curvature, gradient), -_LONGEST_STEP, _LONGEST_STEP)
        found += step
        if float(np.abs(step).max()) < _TOLERANCE:
            break
    return found


def mean_interval(values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 percent interval of a mean by the percentile bootstrap; raises `ValueError` for no values."""
    numbers = _numbers(values)
    return ratio_interval(numbers, np.ones_like(numbers), seed=seed, resamples=resamples)


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 percent interval of a ratio of sums, for example bits per byte of documents, by the percentile bootstrap.

    Samples whose denominator is 0 are left out. Raises `ValueError` for no items, and if all denominators are 0.
    """
    found = _resampled(_numbers(numerators), _numbers(denominators), seed, resamples)
    if not found.size:
        raise ValueError("every denominator is 0")
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def share_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 percent interval of the share `right` / `count` by Wilson's score (1927).

    Raises `ValueError` unless 0 <= right <= count and count > 0.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is no share")
    share, spread = right / count, _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # Rounding would leave a trace of these ends.
    return 0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half


def probability_above(ours: ArrayLike, theirs: ArrayLike) -> tuple[float, float, float]:
    """The probability that one of `ours` is above one of `theirs`, and its 95 percent interval; equal ones count half.

    The estimate is Mann and Whitney's (1947). The interval has all probabilities that are within 1.96 standard errors
    of it, where the error is Hanley and McNeil's (1982) at that probability (Newcombe 2006, method 5). Raises
    `ValueError` for no values.
    """
    high_ones, low_ones = _numbers(ours), np.sort(_numbers(theirs))
    below = np.searchsorted(low_ones, high_ones, "left") + np.searchsorted(low_ones, high_ones, "right")
    value = float(below.mean() / (2 * low_ones.size))
    sizes = high_ones.size, low_ones.size
    return value, _lower_end(value, *sizes), 1 - _lower_end(1 - value, *sizes)


def _lower_end(value: float, ours: int, theirs: int) -> float:
    """The lower end of the interval of `probability_above`, by bisection."""
    low, high = 0.0, value
    for _ in range(60):
        middle = (low + high) / 2
        shape = 1 + ((ours + theirs) / 2 - 1) * ((1 - middle) / (2 - middle) + middle / (1 + middle))
        error = math.sqrt(middle * (1 - middle) * shape / (ours * theirs))
        low, high = (middle, high) if value - middle > _Z * error else (low, middle)
    return low


def paired_bootstrap(
    ours: ArrayLike, theirs: ArrayLike, weights: ArrayLike | None = None, *, seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """The mean of ours - theirs over the same items, weighted by `weights`.

    `p` is the share of bootstrap samples whose mean, after subtracting the observed mean, is at least as far from 0 as
    the observed one. The observed one counts as a sample, so `p` is never 0 (Davison and Hinkley 1997, section 4.2.3).
    """
    differences = _numbers(ours) - _numbers(theirs)
    given = np.ones_like(differences) if weights is None else _numbers(weights)
    value = float((differences * given).sum() / given.sum())
    found = _resampled(differences * given, given, seed, resamples)
    low, high = np.percentile(found, [2.5, 97.5])
    far = int((np.abs(found - value) >= abs(value) * (1 - 1e-12)).sum())
    return Difference(value, (float(low), float(high)), (far + 1) / (found.size + 1), differences.size)


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> Difference:
    """The difference of two shares over the same items, by McNemar's exact test (1947).

    The test counts the items that only one model has right, which is either model with equal chance if the models are
    equal. The interval is Newcombe's for paired shares (1998, method 10). Raises `ValueError` for no items or unpaired
    ones.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} items cannot be paired with {len(theirs)}")
    count = len(ours)
    both = sum(a and b for a, b in zip(ours, theirs, strict=True))
    gained, lost = sum(ours) - both, sum(theirs) - both
    value = (gained - lost) / count
    return Difference(value, _newcombe(both, gained, lost, count), _sign_test(gained, lost), count)


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that at least one of k samples is right, estimated from `right` of `count` samples.

    The unbiased estimate 1 - C(count - right, k) / C(count, k) (Chen et al. 2021, equation 1). Raises `ValueError` for
    k above `count`.
    """
    if not 0 <= right <= count or not 1 <= k <= count:
        raise ValueError(f"pass@{k} cannot be estimated from {right} of {count}")
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def seeds_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 percent interval of the mean over seeds by Student's t; raises `ValueError` for fewer than two values."""
    if len(values) < 2:
        raise ValueError("one value has no spread; give those of two seeds or more")
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    return mean - half, mean + half


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


def student_quantile(freedom: int) -> float:
    """The 97.5 percent point of Student's t distribution with `freedom` degrees, by bisection of its CDF."""
    low, high = 0.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < 0.975 else (low, middle)
    return (low + high) / 2


def _student(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, in closed form (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = total = 1.0 if freedom % 2 == 0 else cosine
    for number in range(2 if freedom % 2 == 0 else 3, freedom - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    if freedom % 2 == 0:
        return 0.5 + 0.5 * math.sin(angle) * total
    within = angle + (math.sin(angle) * total if freedom > 1 else 0.0)
    return 0.5 + within / math.pi


def _numbers(values: ArrayLike) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError("an interval needs at least one value")
    return numbers


def _resampled(numerators: Floats, denominators: Floats, seed: int, resamples: int) -> Floats:
    """The ratios of sums in all bootstrap samples whose denominator is not 0."""
    if numerators.size != denominators.size:
        raise ValueError(f"{numerators.size} numerators do not fit {denominators.size} denominators")
    both = np.stack([numerators, denominators], axis=1)
    above, below = bootstrap(lambda times: times @ both, numerators.size, seed, "bootstrap", resamples).T
    return above[below != 0] / below[below != 0]


def _sign_test(gained: int, lost: int) -> float:
    """The two-sided p value of `gained` heads and `lost` tails of a fair coin."""
    total, least = gained + lost, min(gained, lost)
    ways = tail = 1
    for number in range(least):
        ways = ways * (total - number) // (number + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**total)


def _newcombe(both: int, gained: int, lost: int, count: int) -> tuple[float, float]:
    ours, theirs = (both + gained) / count, (both + lost) / count
    (low1, high1), (low2, high2) = share_interval(both + gained, count), share_interval(both + lost, count)
    neither = count - both - gained - lost
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    cross = float(both * neither - gained * lost)
    if cross > 0:
        cross = max(cross - count / 2, 0.0)
    phi = 0.0 if margins == 0 else cross / math.sqrt(margins)

    def side(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))

    value = ours - theirs
    return value - side(ours - low1, high2 - theirs), value + side(high1 - ours, theirs - low2)
