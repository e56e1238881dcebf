"""The best size and number of tokens for a budget of operations or of time, and curves of equal operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from sheepop.scale.fit import Observation
from sheepop.scale.law import REPETITIONS, Law, effective_tokens

_SMALLEST, _LARGEST = 1e3, 1e13  # weights
_EQUAL = 1.15  # runs whose operations differ by less than this factor have equal operations
_FEWEST_ON_A_CURVE = 3


@dataclass(frozen=True)
class Cost:
    """What training on one token costs, `fixed + each * N`, in the unit of a budget."""

    each: float = 6.0
    fixed: float = 0.0

    @classmethod
    def measured(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Self:
        """The seconds of a token by the number of weights, from measured sizes.

        Both numbers are 0 or more, and relative errors count. Every step has work that does not depend on the size.
        """
        from scipy.optimize import nnls  # loads slowly

        rows = np.array([[size / time, 1 / time] for size, time in zip(sizes, seconds, strict=True)])
        scale = rows.max(axis=0)
        (each, fixed), _ = nnls(rows / scale, np.ones(len(rows)))
        return cls(float(each / scale[0]), float(fixed / scale[1]))

    def of_token(self, parameters: float) -> float:
        """The cost of one training token."""
        return self.fixed + self.each * parameters


@dataclass(frozen=True)
class Use:
    """What a model is for, beside its budget.

    Of the text, `unique` tokens are different; repeated ones are worth what `effective_tokens` says. The budget also
    pays for writing or reading `inference` tokens later, each a third of the cost of a training token (Sardana and
    Frankle 2023, arXiv 2401.00448, equation 1: 6 N D + 2 N D'). The text is read at most `most_passes` times, if these
    are given: beyond them a network that memorises text is no longer described by that law.
    """

    unique: float | None = None
    repetitions: float = REPETITIONS
    inference: float = 0.0
    most_passes: float | None = None

    def tokens(self, budget: float, cost: Cost, parameters: float) -> float:
        """The training tokens that the budget leaves for a model of this size; 0 or less if it cannot pay for any."""
        return budget / cost.of_token(parameters) - self.inference / 3

    def allows(self, tokens: float) -> bool:
        """Returns whether a run with these tokens reads the text at most `most_passes` times."""
        return self.unique is None or self.most_passes is None or tokens <= self.most_passes * self.unique

    def worth(self, tokens: float) -> float:
        """Returns how many new tokens lower the loss as much as `tokens`, some of which are repeated."""
        return effective_tokens(tokens, self.unique, self.repetitions)


def best_size(law: Law, budget: float, cost: Cost = Cost(), use: Use = Use()) -> tuple[float, float]:
    """The N and D of the lowest loss that cost the budget, by a search over log N.

    With ``Cost()`` the budget is in operations, 6 N D; without repetitions and inference this is `Law.optimum`.
    """
    from scipy.optimize import minimize_scalar  # loads slowly

    def loss(log_n: float) -> float:
        parameters = math.exp(log_n)
        tokens = use.tokens(budget, cost, parameters)
        if not use.allows(tokens):  # a larger network reads the text less often
            return 1e9 * (1 + math.log(_LARGEST) - log_n)
        found = law.loss(parameters, use.worth(tokens))
        return found if math.isfinite(found) else 1e9 * (1 + log_n)

    grid = np.linspace(math.log(_SMALLEST), math.log(_LARGEST), 200)
    place = int(np.argmin([loss(x) for x in grid]))
    around = grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)]
    parameters = math.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-9}).x)
    return parameters, use.tokens(budget, cost, parameters)


@dataclass(frozen=True)
class Curve:
    """The loss of runs with equal operations as a parabola in ln N: a (ln N - ln `best`)^2 + `loss`.

    `best` is None if the parabola has no lowest point between the smallest and the largest of its runs.
    """

    flops: float
    runs: tuple[Observation, ...]
    coefficients: tuple[float, float, float]
    best: float | None
    loss: float | None


def curves(runs: Sequence[Observation]) -> list[Curve]:
    """The curves of equal operations (Hoffmann et al. 2022, approach 2), from runs of three sizes at least each."""
    groups: list[list[Observation]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops <= _EQUAL * groups[-1][0].flops:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [_curve(group) for group in groups if len({run.parameters for run in group}) >= _FEWEST_ON_A_CURVE]


def _curve(runs: Sequence[Observation]) -> Curve:
    logs = np.log([run.parameters for run in runs])
    a, b, c = (float(each) for each in np.polyfit(logs, [run.loss for run in runs], 2))
    middle = -b / (2 * a) if a > 0 else math.inf
    inside = logs.min() <= middle <= logs.max()
    flops = math.exp(float(np.mean(np.log([run.flops for run in runs]))))
    return Curve(
        flops, tuple(runs), (a, b, c), math.exp(middle) if inside else None, c - b**2 / (4 * a) if inside else None
    )
