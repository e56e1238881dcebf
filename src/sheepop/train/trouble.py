"""Trouble in a step: a loss or gradient norm that is not finite, or a spike compared with the steps before."""

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
# The standard deviation of a normal distribution, in median absolute deviations.
_DEVIATIONS = 1.4826
# The smallest spread relative to the median: with a smaller one a z-score would only magnify rounding.
_SMALLEST_SPREAD = 1e-3
_LARGEST_EXPONENT = 700.0


class TroubleConfig(Config):
    """How a run treats a step whose loss or gradient cannot be right.

    A spike is a loss, or a gradient norm, whose robust z-score over the last steps is above `threshold`.
    """

    non_finite: MayChange[Policy] = "skip"
    """If the loss or the gradient norm is NaN or infinite: `stop` saves and ends the run, `skip` leaves the weights
    unchanged and continues, `rewind` goes back to a checkpoint and leaves the batch out."""
    spike: MayChange[Literal["ignore", "stop", "skip", "rewind"]] = "skip"
    """If one of them is far above its values in the steps before: `ignore`, or a policy as for `non_finite`."""
    window: Annotated[int, Field(ge=16, le=4096)] = 128
    """Number of accepted steps that a step is compared with; the search for spikes begins once half of them exist."""
    threshold: MayChange[float] = Field(20.0, gt=1)
    """A spike is more than this many robust standard deviations above the median."""
    max_skips: MayChange[Annotated[int, Field(ge=1)]] = 10
    """The run stops after this many skipped steps in a row."""
    max_rewinds: MayChange[Annotated[int, Field(ge=1)]] = 3
    """The run stops after this many rewinds in total."""


@dataclass(frozen=True)
class Trouble:
    """A description of the problem with a step, and the policy of the configuration for it."""

    kind: Literal["non-finite", "spike"]
    words: str
    policy: Policy


@dataclass(frozen=True)
class Window:
    """The losses and gradient norms of the last accepted steps, oldest first; part of every checkpoint."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def after(self, loss: float, norm: float, size: int) -> Window:
        """The window with one more step, cut to the last `size` steps."""
        return Window((*self.losses, loss)[-size:], (*self.norms, norm)[-size:])


@dataclass(frozen=True)
class Limits:
    """The greatest loss and the greatest gradient norm that are not a spike."""

    loss: float = math.inf
    norm: float = math.inf

    @classmethod
    def of(cls, window: Window, config: TroubleConfig) -> Limits:
        """The exact limits of `find_trouble`, known before the step: it finds no trouble at or below both of them."""
        if config.spike == "ignore" or not _is_filled(window, config):
            return cls()
        loss, norm = _Spread.of(window.losses), _Spread.of([_log(value) for value in window.norms])
        highest = norm.median + config.threshold * norm.spread
        return cls(
            _last(lambda value: loss.score(value) <= config.threshold, loss.median + config.threshold * loss.spread),
            # The exponential of a larger number overflows.
            _last(lambda value: norm.score(_log(value)) <= config.threshold, math.exp(highest))
            if highest < _LARGEST_EXPONENT
            else math.inf,
        )

    def allow(self, loss: float, norm: float) -> bool:
        """Whether both are finite and neither is above its limit."""
        return math.isfinite(loss) and math.isfinite(norm) and loss <= self.loss and norm <= self.norm


def find_trouble(loss: float, norm: float, window: Window, config: TroubleConfig) -> Trouble | None:
    """Returns the trouble of a step with this loss and gradient norm, or None if it resembles the steps before.

    The search for spikes begins once half of the window is filled.
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


def final_words(trouble: Trouble, step: int, skips: int, rewinds: int) -> str:
    """The message of a run that ends with trouble in `step`, with the numbers of skips in a row and of rewinds."""
    tried = {
        "stop": "",
        "skip": f" after {skips:,} steps were skipped in a row",
        "rewind": f" after {rewinds:,} rewinds, with no checkpoint left to go back to or no more allowed",
    }[trouble.policy]
    key = "non_finite" if trouble.kind == "non-finite" else "spike"
    return (
        f"Step {step:,} gave {trouble.words}, and training stopped{tried}. Everything before it is saved. "
        "Lower training.learning_rate or raise training.warmup_steps in a new run, or resume with another "
        f"training.trouble.{key} (skip, rewind)."
    )


def robust_z_score(value: float, values: Sequence[float]) -> float:
    """How many robust standard deviations `value` is above the median of `values`.

    This is ``(x - median) / (1.4826 MAD)``. Single spikes in the window hardly change MAD, the median absolute
    deviation (Hampel 1974).
    """
    return _Spread.of(values).score(value)


@dataclass(frozen=True)
class _Spread:
    """The median of some values and their robust standard deviation."""

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
    """The greatest number that passes, searched from `near`, which differs from it only by rounding."""
    while not passes(near):
        near = math.nextafter(near, -math.inf)
    while math.isfinite(near) and passes(above := math.nextafter(near, math.inf)):
        near = above
    return near
