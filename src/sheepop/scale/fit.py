"""Fits a law to finished runs, with intervals from a bootstrap over the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.random import numpy_generator
from sheepop.scale.law import Law, effective_tokens, known_laws

# Huber's delta on logarithms is the noise of small runs. Hoffmann et al. 2022 (appendix D.3) have 1e-3 for large ones.
DELTA = 5e-3
_EXPONENTS, _LEVELS, _FLOORS = (0.1, 0.3, 0.5, 1.0, 1.5), (0, 5, 10, 15, 20, 25), (-1.0, -0.5, 0.0, 0.5, 1.0)
_BEST_STARTS = 6
_NUMBERS, _FREE_NUMBERS = 5, 3  # of a law, and of one whose exponents the prior holds; one more run shows their error
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 0.01, 3.0
_LARGEST_LOG = 60.0
_MOST_STEPS, _LEAST_GAIN = 400, 1e-11
# The prior: exponents differ by a quarter from one kind of text and network to another, the best size for a budget by
# a factor of two, two equal runs by one percent.
PRIOR = "besiroglu"
_PRIOR_SPREAD, _SIZE_SPREAD, _NOISE = 0.25, math.log(2), 0.01
# From this many runs on, over this range of N and of D, the runs alone decide.
_ENOUGH_RUNS, _ENOUGH_RANGE = 16, 10.0
RESAMPLES = 100
_INTERVAL, _NORMAL = (2.5, 97.5), 1.96
_CHEAPER = 1.5  # times fewer operations than the dearest run, for a run that is to predict it
_ROWS_OF_STARTS = np.array(list(product(_LEVELS, _LEVELS, _FLOORS, _EXPONENTS, _EXPONENTS)), dtype=np.float64)


@dataclass(frozen=True)
class Observation:
    """A finished run: its weights that multiply a token, its training tokens, and its held-out loss in nats per token.

    Of the tokens, `unique` are different (None: all of them).
    """

    name: str
    parameters: float
    tokens: float
    loss: float
    unique: float | None = None

    @property
    def flops(self) -> float:
        """The operations of its training, 6 N D."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class KnownBest:
    """The best number of weights for so many operations, as it is known from elsewhere."""

    flops: float
    parameters: float


@dataclass(frozen=True)
class Fit:
    """The law of some runs, those of the resampled runs, and whether the prior took part.

    `runs` is the number of runs, and `flops` are the operations of the dearest. `error` is the standard deviation of
    the residuals of the logarithm of the loss. `drift` is how far a law of the cheaper runs was off for the dearest, as
    a logarithm for each factor of e in operations.
    """

    law: Law
    resampled: tuple[Law, ...]
    with_prior: bool
    runs: int
    error: float
    flops: float
    drift: float

    @property
    def _wider(self) -> float:
        """What a fit that uses up as many runs as it has free numbers makes too small, by the degrees of freedom."""
        return math.sqrt(self.runs / max(1, self.runs - (_FREE_NUMBERS if self.with_prior else _NUMBERS)))

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of the loss of equal runs; of few runs it is at least one percent."""
        return max(self._wider * self.error, _NOISE if self.with_prior else 0.0)

    def interval(self, quantity: Callable[[Law], float]) -> tuple[float, float]:
        """The 95 percent interval of a quantity above 0 by the resampled laws.

        Resampling understates the spread, because every fit uses up runs; so the distances of logarithms from the law's
        own value are enlarged by sqrt(runs / (runs - numbers)), for three free numbers with the prior, else five.
        """
        own, values = math.log(quantity(self.law)), [math.log(quantity(each)) for each in self.resampled]
        low, high = np.percentile(values, _INTERVAL)
        wider = self._wider
        return math.exp(own + wider * min(0.0, low - own)), math.exp(own + wider * max(0.0, high - own))

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 percent interval of each number of the law."""
        return {name: self.interval(attrgetter(name)) for name in self.law.to_dict()}

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """The loss of a new run in nats per token, with the 95 percent interval in which it will lie.

        The interval has three parts: the law's own, the noise of the run, and the drift of the law beyond the runs.
        """
        beyond = max(0.0, math.log(6 * parameters * tokens / self.flops))
        deviation = math.hypot(self.noise, self.drift * beyond)
        return self._measured(lambda law: law.loss(parameters, tokens), deviation)

    def compare(self, run: tuple[float, float], other: tuple[float, float]) -> tuple[float, float, float]:
        """Returns the ratio of the losses of two new runs, `other` over `run`, with its 95 percent interval.

        Both are weights and tokens, of about as many operations, so that the drift of the law is the same for both. The
        interval has the other two parts: the law's own, and the noise of two runs.
        """
        if math.isinf(self.law.loss(*other)):
            return math.inf, math.inf, math.inf
        return self._measured(lambda law: law.loss(*other) / law.loss(*run), math.sqrt(2) * self.noise)

    def _measured(self, quantity: Callable[[Law], float], deviation: float) -> tuple[float, float, float]:
        """A quantity by the law, with the 95 percent interval of its measured logarithm, which has the `deviation`."""
        middle, (low, high) = quantity(self.law), self.interval(quantity)
        below, above = (math.hypot(math.log(end / middle), _NORMAL * deviation) for end in (low, high))
        return middle, middle * math.exp(-below), middle * math.exp(above)

    def to_dict(self) -> dict[str, Any]:
        """The law, its intervals and the prior as plain data."""
        return {
            **self.law.to_dict(),
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "prior": PRIOR if self.with_prior else None,
            "error": self.error,
            "noise": self.noise,
            "drift": self.drift,
        }


def needs_prior(runs: Sequence[Observation]) -> bool:
    """Whether the runs are too few, or too alike, to determine both exponents."""
    ranges = [max(values) / min(values) for values in ([run.parameters for run in runs], [run.tokens for run in runs])]
    return len(runs) < _ENOUGH_RUNS or min(ranges) < _ENOUGH_RANGE


def fit_law(
    runs: Sequence[Observation],
    *,
    prior: bool | None = None,
    known: KnownBest | None = None,
    repetitions: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Fit:
    """The law that fits the runs best: Huber's loss on logarithms of the loss, by L-BFGS from a grid of starts.

    That is the procedure of Hoffmann et al. 2022, equation 3. `prior` draws the exponents towards those of `PRIOR`,
    and the best size towards the `known` one; None decides by `needs_prior`. With `repetitions`, repeated
    tokens count as `effective_tokens` says. The bootstrap draws `resamples` times as many runs with replacement. Raises
    `DataError` for fewer than six different runs.
    """
    if len({(run.parameters, run.tokens) for run in runs}) <= _NUMBERS:
        raise DataError(f"A law has five numbers, so it needs {_NUMBERS + 1} different runs; {len(runs)} were given.")
    with_prior = needs_prior(runs) if prior is None else prior
    problem = _Problem(runs, with_prior, known, repetitions)
    everything = np.ones(len(runs))
    best = problem.solve(problem.starts(everything), everything)
    draw, drawn = numpy_generator(seed, "prior"), []
    for weights in _resamples(runs, resamples, seed):
        drawn.append(problem.with_prior_at(draw.standard_normal(3)).solve([best], weights))
    laws, error = tuple(problem.law(each) for each in drawn), float(problem.residuals(best).std())
    return Fit(problem.law(best), laws, with_prior, len(runs), error, float(problem.flops.max()), _drift(problem, best))


def _drift(problem: _Problem, best: NDArray[np.float64]) -> float:
    """How far the law of the cheaper runs is off for the dearest, for each factor of e in operations; 0 for few.

    `best` is the vector of the law of all runs.
    """
    flops = problem.flops
    is_cheaper = _CHEAPER * flops < flops.max()
    if is_cheaper.sum() <= _NUMBERS:
        return 0.0
    weights = is_cheaper.astype(np.float64)
    missed = problem.residuals(problem.solve([best], weights))[~is_cheaper].mean()
    further = np.log(flops[~is_cheaper]).mean() - math.log(flops[is_cheaper].max())
    return float(abs(missed) / further)


def _resamples(runs: Sequence[Observation], count: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each run counts in each resample; those with fewer than five different runs are drawn again."""
    draw, kinds = numpy_generator(seed, "bootstrap"), [(run.parameters, run.tokens) for run in runs]
    made = 0
    while made < count:
        weights = np.bincount(draw.integers(len(runs), size=len(runs)), minlength=len(runs)).astype(np.float64)
        if len({kind for kind, weight in zip(kinds, weights, strict=True) if weight}) >= _NUMBERS:
            made += 1
            yield weights


class _Problem:
    """The loss of a law on some runs, by the vector (log A', log B', log E, alpha, beta).

    A' and B' are the terms at the mean logarithms of N and D, so that the five numbers hardly depend on each other.
    """

    def __init__(
        self, runs: Sequence[Observation], with_prior: bool, best: KnownBest | None, repetitions: float | None
    ) -> None:
        tokens = [
            run.tokens if repetitions is None else effective_tokens(run.tokens, run.unique, repetitions) for run in runs
        ]
        log_n, log_d = np.log([run.parameters for run in runs]), np.log(tokens)
        self.flops = 6 * np.exp(log_n + log_d)
        self.log_loss = np.log([run.loss for run in runs])
        self.middle = np.array([log_n.mean(), log_d.mean()])
        self.log_n, self.log_d = log_n - self.middle[0], log_d - self.middle[1]
        law = known_laws()[PRIOR].law
        self.prior = np.log([law.alpha, law.beta])
        self.known_flops, self.size = (0.0, 0.0) if best is None else (best.flops, math.log(best.parameters))
        # Beyond delta a residual r costs |r| / delta here, and |r| / noise in the likelihood.
        strength = _NOISE / DELTA if with_prior else 0.0
        self.strength, self.strength_of_size = strength / _PRIOR_SPREAD**2, strength / _SIZE_SPREAD**2

    def with_prior_at(self, away: NDArray[np.float64]) -> _Problem:
        """The same problem with a prior that is drawn from its own spread: `away` are three standard normal numbers.

        A fit to a prior at its middle knows nothing of that spread. Fits to drawn ones and to drawn runs together are
        draws from the posterior (Bardsley et al. 2014, randomize then optimize).
        """
        moved = copy(self)
        moved.prior = self.prior + _PRIOR_SPREAD * away[:2]
        moved.size = self.size + _SIZE_SPREAD * float(away[2])
        return moved

    def starts(self, weights: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """The starts of the grid with the smallest residuals."""
        rows = _ROWS_OF_STARTS.copy()
        rows[:, :2] -= rows[:, 3:] * self.middle
        away = np.abs(self.residuals(rows.T[:, :, None])) @ weights
        return list(rows[np.argsort(away)[:_BEST_STARTS]])

    def _terms(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(3, ..., runs): the logarithms of the three terms of the law, for vectors x (5,) or (5, ..., 1)."""
        return np.stack([x[0] - x[3] * self.log_n, x[1] - x[4] * self.log_d, x[2] + 0 * self.log_n])

    def residuals(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., runs): the logarithm of the law's loss less that of the measured one, for each run."""
        return np.asarray(np.logaddexp.reduce(self._terms(x), axis=0) - self.log_loss)

    def cost(self, x: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """The weighted sum of Huber's losses in units of delta squared, with the prior, and its gradient."""
        parts = np.exp(self._terms(x))
        total = parts.sum(axis=0)
        scaled, shares = (np.log(total) - self.log_loss) / DELTA, parts / total
        size = np.abs(scaled)
        slope = weights * np.clip(scaled, -1, 1) / DELTA
        value = float((weights * np.where(size <= 1, scaled**2 / 2, size - 0.5)).sum())
        gradient = np.array([*(shares @ slope), -(shares[0] * self.log_n) @ slope, -(shares[1] * self.log_d) @ slope])
        away = np.log(x[3:]) - self.prior
        gradient[3:] += self.strength * away / x[3:]
        value += float(self.strength * (away**2).sum() / 2)
        if self.known_flops:
            log_size, change = self._best_size(x, self.known_flops)
            too_large = log_size - self.size
            value += self.strength_of_size * too_large**2 / 2
            gradient += self.strength_of_size * too_large * change
        return value, gradient

    def _best_size(self, x: NDArray[np.float64], flops: float) -> tuple[float, NDArray[np.float64]]:
        """The logarithm of the best N for so many operations (`Law.optimum`), and its gradient."""
        log_a, log_b, _, alpha, beta = (float(each) for each in x)
        log_n, log_d = float(self.middle[0]), math.log(flops / 6) - float(self.middle[1])
        total = alpha + beta
        size = (math.log(alpha / beta) + log_a - log_b + alpha * log_n + beta * log_d) / total
        return size, np.array([1.0, -1.0, 0.0, 1 / alpha + log_n - size, log_d - 1 / beta - size]) / total

    def solve(self, starts: Sequence[NDArray[np.float64]], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The vector of the lowest cost that is reached from any of the starts."""
        from scipy.optimize import minimize  # loads slowly

        limits = [(-_LARGEST_LOG, _LARGEST_LOG)] * 3 + [(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)] * 2
        options = {"maxiter": _MOST_STEPS, "maxfun": 2 * _MOST_STEPS, "ftol": _LEAST_GAIN, "gtol": 1e-9, "maxcor": 20}
        found = [
            minimize(self.cost, start, args=(weights,), jac=True, method="L-BFGS-B", bounds=limits, options=options)
            for start in starts
        ]
        return np.asarray(min(found, key=lambda each: float(each.fun)).x)

    def law(self, x: NDArray[np.float64]) -> Law:
        """Returns the law whose numbers the vector x (5,) holds, as the search has them."""
        a, b = np.exp(x[:2] + x[3:] * self.middle)
        return Law(*map(float, (math.exp(x[2]), a, b, x[3], x[4])))
