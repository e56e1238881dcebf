"""A family of small runs: which sizes are trained on how many tokens, kept in ``family.json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sheepop.core.budget import Budget
from sheepop.core.errors import DataError, UsageError
from sheepop.core.files import read_json, write_json
from sheepop.scale.allocation import Cost, Use
from sheepop.scale.fit import Observation
from sheepop.scale.shapes import Shape, shape_for

FAMILY = "family.json"
FORMAT = 1
_LEVELS, _STEP = 3, 3.0  # curves of equal operations, and how much more the next one has
_AROUND = (0.35, 0.7, 1.4, 2.8)  # sizes of each curve, relative to its best one
_FEWEST_STEPS, _FEWEST_RUNS = 30, 6


@dataclass(frozen=True)
class Member:
    """A run of the family: its shape and its steps."""

    shape: Shape
    steps: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.shape}-{self.steps}"

    def cost(self, vocab_size: int, step_tokens: int) -> float:
        """Its operations, 6 N D."""
        return 6.0 * self.shape.parameters(vocab_size) * self.steps * step_tokens


@dataclass(frozen=True)
class Beside:
    """A finished run beside the prediction that was made without it: losses in nats per token."""

    name: str
    loss: float
    predicted: float
    low: float
    high: float

    @property
    def is_inside(self) -> bool:
        """Whether the loss lies in the interval of the prediction."""
        return self.low <= self.loss <= self.high


@dataclass(frozen=True)
class Family:
    """The plan of a family, what it is for, and what was learnt since.

    `settings` are those that all runs share, a tree; `corpus` is the text of `unique` training tokens. `cost` is that
    of a token in the unit of the budget. The recipe's own choice for the budget of `flops` operations is `recipe`.
    `added` are runs from outside, and `beside` their losses beside the predictions made before.
    """

    corpus: str
    vocab_size: int
    unique: int
    members: tuple[Member, ...]
    settings: dict[str, Any]
    budget: Budget
    use: Use
    flops: float
    recipe: Shape
    cost: Cost = field(default_factory=Cost)
    added: tuple[Observation, ...] = ()
    beside: tuple[Beside, ...] = ()
    format: int = FORMAT

    def learning_rate(self, shape: Shape) -> float:
        """The rate of a run of this shape: a given one, else the rule's; under muP the rule's for the base width.

        muP itself changes the rate of the base with the width (Yang et al. 2022).
        """
        given, base = self.settings["training"].get("learning_rate"), self.settings["model"].get("mup_base_d_model")
        if given is not None:
            return float(given)
        return (shape if base is None else Shape.of_width(int(base))).learning_rate

    def write(self, directory: Path) -> None:
        """Writes ``family.json``."""
        write_json(directory / FAMILY, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Family:
        """The family in a directory; raises `DataError` if there is none, or its file is damaged or newer."""
        file = directory / FAMILY
        if not file.is_file():
            raise DataError(
                f"{directory} holds no family of runs. Make one with: sheepop scale --data PATH --budget 1h"
            )
        found = read_json(file, DataError)
        if isinstance(found, dict) and isinstance(found.get("format"), int) and found["format"] > FORMAT:
            raise DataError(f"{file} has format {found['format']}; this version reads up to {FORMAT}. Update SheepOp.")
        try:
            return TypeAdapter(cls).validate_python(found)
        except ValidationError as error:
            where = ".".join(str(each) for each in error.errors()[0]["loc"])
            raise DataError(f"{file} is damaged: {where}: {error.errors()[0]['msg']}.") from None


def plan_family(
    spend: float, vocab_size: int, best: Callable[[float], float], step_tokens: int, sizes: Sequence[Shape] = ()
) -> list[Member]:
    """Runs on three curves of equal operations, which cost at most `spend` operations; the cheapest come first.

    Each curve has four sizes around the `best` number of weights for its operations, of which those that get fewer than
    30 steps are left out, or all `sizes`. Raises `UsageError` for a `size` that gets fewer steps, and for a family of
    fewer than six runs or three sizes.
    """
    count = len(sizes) or len(_AROUND)
    if 0 < len(sizes) < 3:
        raise UsageError("--sizes: a law needs three sizes at least, such as 32x2,64x2,96x2.")
    largest = spend / count / sum(_STEP**-level for level in range(_LEVELS))
    members: dict[str, Member] = {}
    for level in reversed(range(_LEVELS)):
        flops = largest * _STEP**-level
        shapes = list(sizes)
        for around in () if sizes else _AROUND:
            shapes.append(shape_for(best(flops) * around, vocab_size, shapes))
        for shape in shapes:
            steps = math.floor(flops / (6 * shape.parameters(vocab_size) * step_tokens))
            if steps < _FEWEST_STEPS and sizes:
                needed = _FEWEST_STEPS * Member(shape, 1).cost(vocab_size, step_tokens) / flops * spend
                raise UsageError(
                    f"The family may spend {spend:.2g} operations, of which a run of {shape} would get {steps} steps; "
                    f"{_FEWEST_STEPS} are the fewest. Give --spend {1.05 * needed:.1e}flops, or smaller --sizes."
                )
            member = Member(shape, steps)
            if steps >= _FEWEST_STEPS:
                members[member.name] = member
    if len(members) < _FEWEST_RUNS or len({member.shape for member in members.values()}) < 3:
        raise UsageError(
            f"{spend:.2g} operations are too few for {_FEWEST_RUNS} runs of three sizes. Raise --spend, or name three "
            "--sizes."
        )
    return list(members.values())
