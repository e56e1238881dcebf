"""A scaling law: the held-out loss by the size of a model and the tokens that it was trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Self

from sheepop.core.errors import DataError
from sheepop.report.series import number

LAWS = "laws.json"
# Muennighoff et al. 2023, table in their appendix A: after this many repetitions most of the worth of text is used up.
REPETITIONS = 15.387756


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token (Hoffmann et al. 2022, equation 2).

    N is a number of weights that multiply a token, D a number of training tokens.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @classmethod
    def of(cls, found: Mapping[str, Any], where: str) -> Self:
        """The law with these five numbers; raises `DataError` if one is missing, not finite, or below 0."""
        values = {}
        for name in ("E", "A", "B", "alpha", "beta"):
            value = number(found.get(name))
            if value is None or value < 0 or (value == 0 and name != "E"):
                raise DataError(f"{where}: {name} = {found.get(name)!r} of a law must be a number above 0.")
            values[name] = value
        return cls(**values)

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model of this many weights after this many tokens; infinite without any of either."""
        if parameters <= 0 or tokens <= 0:
            return math.inf
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    @property
    def share(self) -> float:
        """The exponent of the best N as a power of the operations: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """The N and D of the lowest loss with 6 N D = `flops` (Hoffmann et al. 2022, equation 4)."""
        total = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
        return ratio * (flops / 6) ** self.share, (flops / 6) ** (self.alpha / total) / ratio

    def to_dict(self) -> dict[str, float]:
        """The five numbers as plain data."""
        return asdict(self)


def effective_tokens(tokens: float, unique: float | None, repetitions: float = REPETITIONS) -> float:
    """How many new tokens are worth as much as `tokens`, of which only `unique` are different.

    U + U R* (1 - exp(-R / R*)) with R = D / U - 1 repetitions (Muennighoff et al. 2023, arXiv 2305.16264, equation 5).
    `repetitions` is R*: with 0 a repeated token is worth nothing, with infinity as much as a new one. Without a
    `unique` number all are new.
    """
    if unique is None or tokens <= unique:
        return tokens
    repeated = tokens / unique - 1
    if math.isinf(repetitions):
        return tokens
    worth = repetitions * -math.expm1(-repeated / repetitions) if repetitions > 0 else 0.0
    return unique * (1 + worth)


@dataclass(frozen=True)
class KnownLaw:
    """A law that is kept with the package, and where it comes from."""

    origin: str
    law: Law


@cache
def known_laws() -> dict[str, KnownLaw]:
    """The laws in ``laws.json``, by name."""
    stored = _stored()["laws"].items()
    return {name: KnownLaw(each["origin"], Law.of(each, f"{LAWS}, {name}")) for name, each in stored}


def recipe_law() -> KnownLaw:
    """The law by which the recipe chooses sizes that are larger than measured ones."""
    return known_laws()[_stored()["recipe"]]


@cache
def _stored() -> dict[str, Any]:
    return dict(json.loads(files("sheepop.scale").joinpath(LAWS).read_text(encoding="utf-8")))
