"""The noise of the gradient, and the batch at which it stops to matter (McCandlish et al. 2018).

The gradient of b rows is the true gradient G plus noise of variance ``tr(S) / b``. Their ratio ``tr(S) / |G|^2`` is the
noise scale, in rows: a batch of that size has as much noise as signal. Smaller batches learn about equally much from
each row; larger ones learn ever less from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sheepop.core.facts import counted

if TYPE_CHECKING:
    from torch import Tensor

_ERRORS = 2.5  # standard errors on each side of an interval; few batches make the error itself uncertain


@dataclass(frozen=True)
class NoiseSample:
    """Unbiased estimates of the noise ``tr(S)`` of one row and of the signal ``|G|^2`` from one batch."""

    noise: float
    signal: float

    @classmethod
    def of(cls, gradients: Iterable[Sequence[Tensor]], rows: int) -> NoiseSample:
        """The estimates from the mean gradients of two or more pieces of a batch, of `rows` rows each (appendix A)."""
        import torch

        total: list[Tensor] = []
        squares: list[Tensor] = []
        for gradient in gradients:
            squares.append(_square(gradient))
            if total:
                torch._foreach_add_(total, list(gradient))
            else:
                total = [each.clone() for each in gradient]
        count = len(squares)
        if count < 2:
            raise ValueError(f"needs the gradients of at least 2 pieces, got {count}")
        of_pieces = float(torch.stack(squares).mean())
        of_whole = float(_square(total)) / count**2
        return cls(
            noise=rows * (of_pieces - of_whole) * count / (count - 1),
            signal=(count * of_whole - of_pieces) / (count - 1),
        )


@dataclass(frozen=True)
class NoiseScale:
    """A noise scale in rows, and the interval that contains it in about nine of ten cases.

    Both may be infinite, if the signal cannot be told from 0; `high` is infinite if only one batch was measured.
    """

    rows: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[NoiseSample]) -> NoiseScale:
        """The scale of these batches together, with the jackknife's error of its inverse (Efron and Stein 1981)."""
        inverse = _inverse(samples)
        count = len(samples)
        error = math.inf
        if count > 1:
            without = [_inverse([*samples[:number], *samples[number + 1 :]]) for number in range(count)]
            mean = sum(without) / count
            error = math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in without))
        low, high = inverse + _ERRORS * error, inverse - _ERRORS * error
        return cls(_inverted(inverse), 1 / low if low > 0 else 0.0, _inverted(high))

    @property
    def words(self) -> str:
        """The scale and its interval: ``64 rows (40 rows to no bound)``."""
        return f"{in_rows(self.rows)} ({in_rows(self.low)} to {in_rows(self.high)})"


def in_rows(rows: float) -> str:
    """A number of rows in words."""
    return "no bound" if rows == math.inf else counted(round(rows), "row")


def _square(gradient: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack(torch._foreach_norm(list(gradient))).double().square().sum()


def _inverse(samples: Sequence[NoiseSample]) -> float:
    """Returns the signal divided by the noise, whose error is more symmetric than that of its inverse."""
    noise = sum(sample.noise for sample in samples)
    return sum(sample.signal for sample in samples) / noise if noise > 0 else math.inf


def _inverted(inverse: float) -> float:
    return 1 / inverse if inverse > 0 else math.inf
