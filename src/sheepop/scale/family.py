"""A family of small runs: which sizes are trained on how many tokens, kept in ``family.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sheepop.core.errors import DataError, UsageError
from sheepop.scale.law import Law
from sheepop.scale.shapes import Shape, shape_for

ROW_TOKENS, ROWS = 128, 16
_LEVELS, _STEP = 3, 3.0  # curves of equal operations, and how much more the next one has
_AROUND = (0.35, 0.7, 1.4, 2.8)  # sizes of each curve, relative to its best one
_FEWEST_STEPS = 30
# A network that reads a token once costs 6 operations a weight; small ones are best a little above the law of large ones.
_GUESS = 2.0


@dataclass(frozen=True)
class Member:
    """A run of the family: its shape and its steps of `ROWS` rows of `ROW_TOKENS` tokens."""

    shape: Shape
    steps: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.shape}-{self.steps}"

    @property
    def tokens(self) -> int:
        """Its training tokens."""
        return self.steps * ROWS * ROW_TOKENS

    def cost(self, vocab_size: int) -> float:
        """Its operations, 6 N D."""
        return 6.0 * self.shape.parameters(vocab_size) * self.tokens

    def to_dict(self) -> dict[str, Any]:
        """The member as plain data."""
        return {"d_model": self.shape.d_model, "num_layers": self.shape.num_layers, "steps": self.steps}

    @classmethod
    def of(cls, found: Mapping[str, Any], where: str) -> Member:
        """The member in a file; raises `DataError` if a number is missing."""
        numbers = [found.get(name) for name in ("d_model", "num_layers", "steps")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise DataError(f"{where}: a member of the family needs d_model, num_layers and steps above 0.")
        width, layers, steps = (int(number) for number in numbers if number is not None)
        return cls(Shape.of_width(width, layers), steps)


def plan_family(spend: float, vocab_size: int, prior: Law, sizes: Sequence[Shape] = ()) -> list[Member]:
    """Runs on three curves of equal operations, which cost `spend` operations together; the cheapest come first.

    Each curve has four sizes around the best one that the `prior` gives, or all `sizes`. Raises `UsageError` if the
    smallest runs would have fewer than 30 steps.
    """
    count = len(sizes) or len(_AROUND)
    if 0 < len(sizes) < 3:
        raise UsageError("--sizes: a law needs three sizes at least, such as 32x2,64x2,96x2.")
    largest = spend / count / sum(_STEP**-level for level in range(_LEVELS))
    members: dict[str, Member] = {}
    for level in reversed(range(_LEVELS)):
        flops = largest * _STEP**-level
        middle = _GUESS * prior.optimum(flops)[0]
        shapes = sizes or [shape_for(middle * around, vocab_size) for around in _AROUND]
        for shape in shapes:
            steps = math.floor(flops / (6 * shape.parameters(vocab_size) * ROWS * ROW_TOKENS))
            if steps < _FEWEST_STEPS:
                raise UsageError(
                    f"The family may spend {spend:.2g} operations, of which a run of {shape} would get {steps} steps; "
                    f"{_FEWEST_STEPS} are the fewest that say anything. Raise --spend, or name smaller --sizes."
                )
            member = Member(shape, steps)
            members[member.name] = member
    if len({member.shape for member in members.values()}) < 3:
        raise UsageError(
            f"{spend:.2g} operations are too few for runs of three sizes. Raise --spend, or name the sizes with --sizes."
        )
    return list(members.values())
