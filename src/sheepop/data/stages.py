"""An integer that changes at given steps: the rows per step, or the tokens per row, during a warm-up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Stages:
    """The value at every step: each pair (until, value) of `stages` covers the steps before `until`; then `final`.

    Steps count from 0. With ``Stages(((10, 4), (30, 8)), 16)`` the value is 4 at steps 0 to 9, 8 at steps 10 to 29,
    and 16 afterwards. Raises ValueError unless the steps increase and all values are at least 1.
    """

    stages: tuple[tuple[int, int], ...]
    final: int

    def __post_init__(self) -> None:
        untils = [0, *(until for until, _ in self.stages)]
        if any(later <= earlier for earlier, later in pairwise(untils)):
            raise ValueError(f"the steps of stages must increase, got {untils[1:]}")
        if min([self.final, *(value for _, value in self.stages)]) < 1:
            raise ValueError("the values of stages must be at least 1")

    @property
    def last_change(self) -> int:
        """The first step at which the value is `final`."""
        return self.stages[-1][0] if self.stages else 0

    def at(self, step: int) -> int:
        """The value at one step."""
        return next(value for _, end, value in self._spans() if step < end)

    def total(self, steps: int) -> int:
        """The sum of the values of the steps ``0 .. steps - 1``."""
        return sum(value * (min(steps, end) - begin) for begin, end, value in self._spans() if begin < steps)

    def steps_to(self, total: float) -> int:
        """The smallest number of steps whose values add up to at least `total`."""
        needed, passed = math.ceil(total), 0  # integers, so that no division rounds
        for begin, end, value in self._spans():
            if passed + value * (end - begin) >= needed:
                return begin + max(0, -(-(needed - passed) // value))
            passed += value * (end - begin)
        return self.last_change - (passed - needed) // self.final

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(begin, end, value) of every stage; the last one has no real end."""
        begin = 0
        for until, value in self.stages:
            yield begin, until, value
            begin = until
        yield begin, 2**63, self.final
