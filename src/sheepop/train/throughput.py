"""How fast a run goes: tokens per second, and the share of the machine's matrix peak that their arithmetic takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sheepop.train.step import PreparedStep


class Throughput:
    """Counts tokens and operations of steps against the time since the last look, less what was spent on other work.

    `flops_per_token` gives the operations of a token by the length of its row, which a run may vary; `peak_flops` is
    what the machine can do in a second.
    """

    def __init__(
        self,
        flops_per_token: Callable[[int], float],
        peak_flops: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flops_per_token, self._peak_flops, self._clock = flops_per_token, peak_flops, clock
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted."""
        self._begin(self._clock())

    def count(self, step: PreparedStep) -> None:
        """Counts a step that was taken."""
        self._tokens += step.num_tokens
        self._flops += step.num_tokens * self._flops_per_token(step.row_length)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within the block is not that of steps."""
        started = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - started

    def take(self) -> tuple[float, float]:
        """Tokens per second and the share of the peak since the last look; counting begins anew."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        rates = self._tokens / seconds, self._flops / seconds / self._peak_flops
        self._begin(now)
        return rates

    def _begin(self, now: float) -> None:
        self._since, self._tokens, self._flops = now, 0, 0.0
