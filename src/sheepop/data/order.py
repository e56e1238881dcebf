"""The orders in which training sees its samples: endless, and computed by position.

Every epoch has every sample once: shuffled anew, or for a number of epochs from easy to hard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed


class Order(Protocol):
    """An endless order of `num_samples` samples in epochs; what comes at a position depends on the position alone."""

    num_samples: int

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at the positions ``start .. start + count - 1``, ``(count,)``."""


class SampleOrder:
    """An endless order of the samples ``0 .. num_samples - 1``; epoch e is a permutation keyed by (seed, e).

    It has no state: what comes at a position depends on the position alone, so one integer resumes it, whatever
    the number of workers, ranks or accumulated micro-batches.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at the positions ``start .. start + count - 1``, ``(count,)``."""
        return _by_epoch(self.num_samples, start, count, self._of_epoch)

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return Permutation(self.num_samples, derive_seed(self.seed, "data order", epoch))(places)


class EasyToHardOrder:
    """The first `epochs` epochs go from easy to hard, the others are those of `SampleOrder`.

    Samples are ranked by `difficulty` (N,), equal ones at random, and the rank over N, moved by a keyed random number
    from ``-jitter / 2`` to ``jitter / 2``, orders an epoch. So no sample comes earlier or later than its rank by more
    than the share `jitter` of an epoch (Bengio et al. 2009, "Curriculum learning").
    """

    def __init__(self, difficulty: NDArray[np.float64], seed: int, *, epochs: int, jitter: float) -> None:
        self.num_samples, self.seed = len(difficulty), seed
        self._after, self._epochs, self._jitter = SampleOrder(len(difficulty), seed), epochs, jitter
        ties = np.random.Philox(key=derive_seed(seed, "difficulty ties")).random_raw(len(difficulty))
        self._ranked = np.lexsort((ties, difficulty)).astype(np.int64)
        self._sorted: tuple[int, NDArray[np.int64]] | None = None  # the epoch that was asked for last

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at the positions ``start .. start + count - 1``, ``(count,)``."""
        return _by_epoch(self.num_samples, start, count, self._of_epoch)

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if epoch >= self._epochs:
            return self._after.indices(epoch * self.num_samples + int(places[0]), len(places))
        found = self._sorted
        if found is None or found[0] != epoch:
            found = self._sorted = (epoch, self._easy_to_hard(epoch))
        return found[1][places]

    def _easy_to_hard(self, epoch: int) -> NDArray[np.int64]:
        draws = np.random.Philox(key=derive_seed(self.seed, "difficulty jitter", epoch)).random_raw(self.num_samples)
        moved = np.arange(self.num_samples) / self.num_samples + self._jitter * (draws / 2.0**64 - 0.5)
        return self._ranked[np.argsort(moved, kind="stable")]


def _by_epoch(
    num_samples: int, start: int, count: int, of_epoch: Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Asks `of_epoch` for the samples at consecutive places of each epoch that the positions touch."""
    if start < 0 or count < 0:
        raise ValueError(f"start and count must not be negative, got {start} and {count}")
    result = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, offset = divmod(start + filled, num_samples)
        size = min(count - filled, num_samples - offset)
        result[filled : filled + size] = of_epoch(epoch, np.arange(offset, offset + size, dtype=np.int64))
        filled += size
    return result
