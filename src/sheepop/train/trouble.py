"""Trouble in the numbers of a step: values that are no numbers, and spikes, told from the steps before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sheepop.core.config import Config
from sheepop.core.keys import MayChange

Policy = Literal["stop", "skip", "rewind"]
# Of a normal distribution the standard deviation is so many median absolute deviations.
_DEVIATIONS = 1.4826
# Below this spread, relative to the value itself, all steps count as equal: a z-score would only magnify rounding.
_SMALLEST_SPREAD = 1e-3
_LARGEST_EXPONENT = 700.0


class TroubleConfig(Config):
    """What happens when the loss or the gradient of a step cannot be right.

    A spike is a loss, or a gradient norm, whose robust z-score over the last steps is above `threshold`.
    """

    non_finite: MayChange[Policy] = "skip"
    """The loss or the gradient norm is NaN or infinite: `stop` saves and ends the run, `skip` leaves the weights as
    they are and continues, `rewind` goes back to a checkpoint and leaves the batch out."""
    spike: MayChange[Literal["ignore", "stop", "skip", "rewind"]] = "skip"
    """One of them is far above its values in the steps before; the policies are those of `non_finite`, or `ignore`."""
    window: Annotated[int, Field(ge=16, le=4096)] = 128
    """Accepted steps that a step is compared with; spikes are looked for once half of them are there."""
    threshold: MayChange[float] = Field(20.0, gt=1)
    """Robust standard deviations above the median that make a spike."""
    max_skips: MayChange[Annotated[int, Field(ge=1)]] = 10
    """Steps skipped in a row after which the run stops."""
    max_rewinds: MayChange[Annotated[int, Field(ge=1)]] = 3
    """Rewinds of the whole run after which it stops."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a step, in words, and what the configuration says to do."""

    kind: Literal["non-finite", "spike"]
    words: str
    policy: Policy


@dataclass(frozen=True)
class Window:
    """Losses and gradient norms of the last accepted steps, oldest first; part of every checkpoint."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def after(self, loss: float, norm: float, size: int) -> Window:
        """The window with one more step, and at most `size` of them."""
        return Window((*self.losses, loss)[-size:], (*self.norms, norm)[-size:])


@dataclass(frozen=True)
class Limits:
    """The greatest loss and the greatest gradient norm that are like those of the steps before."""

    loss: float = math.inf
    norm: float = math.inf

    @classmethod
    def of(cls, window: Window, config: TroubleConfig) -> Limits:
        """Those of `find_trouble`, known before the step: it finds no trouble up to exactly these numbers.

        `loss` is such a limit for any norm, and `norm` for any loss.
        """
        if config.spike == "ignore" or not _is_filled(window, config):
            return cls()
        loss, norm = _Spread.of(window.losses), _Spread.of([_log(value) for value in window.norms])
        highest = norm.median + config.threshold * norm.spread
        return cls(
            _last(lambda value: loss.score(value) <= config.threshold, loss.median + config.threshold * loss.spread),
            # Beyond the largest exponent there is no number to compare with.
            _last(lambda value: norm.score(_log(value)) <= config.threshold, math.exp(highest))
            if highest < _LARGEST_EXPONENT
            else math.inf,
        )

    def allow(self, loss: float, norm: float) -> bool:
        """Whether both are numbers and neither is above its limit."""
        return math.isfinite(loss) and math.isfinite(norm) and loss <= self.loss and norm <= self.norm


def find_trouble(loss: float, norm: float, window: Window, config: TroubleConfig) -> Trouble | None:
    """What is wrong with a step of this loss and gradient norm, None when it is like those before it.

    Spikes are looked for once half of the window is filled.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Trouble("non-finite", f"loss {loss} and gradient norm {norm}", config.non_finite)
    if config.spike == "ignore" or not _is_filled(window, config):
        return None
    # Gradient norms are skewed to the right; their logarithms are close to symmetric.
    scores = {
        f"loss {loss:.4f}": robust_z_score(loss, window.losses),
        f"gradient norm {norm:.4g}": robust_z_score(_log(norm), [_log(value) for value in window.norms]),
    }
    words, score = max(scores.items(), key=lambda item: item[1])
    if score <= config.threshold:
        return None
    return Trouble("spike", f"{words}, {score:,.1f} robust deviations above the median", config.spike)


def robust_z_score(value: float, values: Sequence[float]) -> float:
    """How many robust standard deviations `value` lies above the median of `values`.

    ``(x - median) / (1.4826 MAD)``, MAD being the median absolute deviation (Hampel 1974), which single spikes in the
    window cannot move.
    """
    return _Spread.of(values).score(value)


@dataclass(frozen=True)
class _Spread:
    """Where values lie, and how far apart."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Spread:
        median = statistics.median(values)
        spread = _DEVIATIONS * statistics.median(abs(other - median) for other in values)
        return cls(median, max(spread, _SMALLEST_SPREAD * max(1.0, abs(median))))

    def score(self, value: float) -> float:
        return (value - self.median) / self.spread


def _is_filled(window: Window, config: TroubleConfig) -> bool:
    return len(window.losses) >= config.window // 2


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def _last(passes: Callable[[float], bool], near: float) -> float:
    """The greatest number that passes, from one so near that only rounding lies between them."""
    while not passes(near):
        near = math.nextafter(near, -math.inf)
    while math.isfinite(near) and passes(above := math.nextafter(near, math.inf)):
        near = above
    return near
