"""How far a number may be from the truth, and whether two numbers differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sheepop.core.random import numpy_generator

RESAMPLES = 2000
_NUMBERS_AT_ONCE = 4_000_000
_Z = 1.959963984540054  # the 97.5 percent point of the normal distribution
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A difference over `count` items, its 95 percent interval, and `p`: how likely chance alone makes one as large."""

    value: float
    interval: tuple[float, float]
    p: float
    count: int


def mean_interval(values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 percent interval of a mean by the percentile bootstrap over items (Efron 1979).

    Raises `ValueError` without a value.
    """
    numbers = _numbers(values)
    return ratio_interval(numbers, np.ones_like(numbers), seed=seed, resamples=resamples)


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The same of a sum over a sum, such as bits over bytes of documents, which are drawn as pairs.

    Draws in which the denominator is 0 are left out. Raises `ValueError` for no items, and where all are like that.
    """
    found = _resampled(_numbers(numerators), _numbers(denominators), seed, resamples)
    if not found.size:
        raise ValueError("every denominator is 0")
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def share_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 percent interval of a share by Wilson's score (1927); raises `ValueError` for what is no share."""
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is no share")
    share, spread = right / count, _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_bootstrap(
    ours: ArrayLike,
    theirs: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """The mean of ours - theirs over the same items, weighted if `weights` are given.

    `p` is two-sided: the share of draws, moved so that their mean is 0, that are as far from 0. It is never 0, for
    further draws might be (Davison and Hinkley 1997, section 4.2.3).
    """
    differences = _numbers(ours) - _numbers(theirs)
    given = np.ones_like(differences) if weights is None else _numbers(weights)
    value = float((differences * given).sum() / given.sum())
    found = _resampled(differences * given, given, seed, resamples)
    low, high = np.percentile(found, [2.5, 97.5])
    far = int((np.abs(found - value) >= abs(value) * (1 - 1e-12)).sum())
    return Difference(value, (float(low), float(high)), (far + 1) / (found.size + 1), differences.size)


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> Difference:
    """The difference of two shares over the same items, by McNemar's test (1947), exact.

    Only items that one of both has right count: between equal models each is as likely as the other to have them. The
    interval is Newcombe's for paired shares (1998, method 10).
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} items cannot be paired with {len(theirs)}")
    count = len(ours)
    both = sum(a and b for a, b in zip(ours, theirs, strict=True))
    gained, lost = sum(ours) - both, sum(theirs) - both
    value = (gained - lost) / count
    return Difference(value, _newcombe(both, gained, lost, count), _sign_test(gained, lost), count)


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that of k samples one is right at least, when `right` of `count` are.

    The unbiased estimate 1 - C(count - right, k) / C(count, k) (Chen et al. 2021, equation 1). Raises `ValueError` for
    k above `count`.
    """
    if not 0 <= right <= count or not 1 <= k <= count:
        raise ValueError(f"pass@{k} cannot be told from {right} of {count}")
    if count - right < k:
        return 1.0
    return 1.0 - math.exp(sum(math.log1p(-k / drawn) for drawn in range(count - right + 1, count + 1)))


def seeds_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 percent interval of the mean of several seeds by Student's t; raises `ValueError` for fewer than two."""
    if len(values) < 2:
        raise ValueError("one value has no spread; give those of two seeds or more")
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student_quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def student_quantile(freedom: int) -> float:
    """The 97.5 percent point of Student's t distribution, by bisection of its distribution function."""
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
    """The ratio of sums in every draw of as many items, with replacement."""
    if numerators.size != denominators.size:
        raise ValueError(f"{numerators.size} numerators do not fit {denominators.size} denominators")
    draw = numpy_generator(seed, "bootstrap")
    at_once = max(1, _NUMBERS_AT_ONCE // numerators.size)
    ratios = []
    for begin in range(0, resamples, at_once):
        chosen = draw.integers(0, numerators.size, (min(at_once, resamples - begin), numerators.size))
        above, below = numerators[chosen].sum(1), denominators[chosen].sum(1)
        ratios.append(above[below != 0] / below[below != 0])
    return np.concatenate(ratios)


def _sign_test(gained: int, lost: int) -> float:
    """How likely a fair coin falls as unevenly, or more."""
    total, least = gained + lost, min(gained, lost)
    if gained == lost:
        return 1.0
    logs = [
        math.lgamma(total + 1) - math.lgamma(number + 1) - math.lgamma(total - number + 1) - total * math.log(2)
        for number in range(least + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


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
