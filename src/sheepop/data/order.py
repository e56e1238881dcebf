"""Endless orders of the training samples, computed from the position.

Every epoch contains every sample once, either newly shuffled or, in the first epochs, sorted from easy to hard.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed


class SampleOrder:
    """An endless order of the samples ``0 .. num_samples - 1``; epoch e is a permutation keyed by (seed, e).

    It has no state: the sample depends on the position alone, so one integer resumes it for any number of workers,
    ranks or accumulated micro-batches.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The samples at the positions ``start .. start + count - 1``, ``(count,)``."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        result = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(start + filled, self.num_samples)
            size = min(count - filled, self.num_samples - offset)
            places = np.arange(offset, offset + size, dtype=np.int64)
            result[filled : filled + size] = self._of_epoch(epoch, places)
            filled += size
        return result

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at `places` of one epoch."""
        return Permutation(self.num_samples, derive_seed(self.seed, "data order", epoch))(places)


class EasyToHardOrder(SampleOrder):
    """The first `epochs` epochs go from easy to hard; later ones are those of `SampleOrder`.

    Samples are ranked by `difficulty` (N,), with random ties. Each epoch sorts by rank / N plus a keyed random number
    from ``-jitter / 2`` to ``jitter / 2``, so no sample moves from its rank by more than the share `jitter` of an epoch
    (Bengio et al. 2009, "Curriculum learning").
    """

    def __init__(self, difficulty: NDArray[np.float64], seed: int, *, epochs: int, jitter: float) -> None:
        super().__init__(len(difficulty), seed)
        self._epochs, self._jitter = epochs, jitter
        ties = np.random.Philox(key=derive_seed(seed, "difficulty ties")).random_raw(len(difficulty))
        self._ranked = np.lexsort((ties, difficulty)).astype(np.int64)
        self._sorted: tuple[int, NDArray[np.int64]] | None = None  # the last epoch that was computed

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if epoch >= self._epochs:
            return super()._of_epoch(epoch, places)
        found = self._sorted
        if found is None or found[0] != epoch:
            key = derive_seed(self.seed, "difficulty jitter", epoch)
            draws = np.random.Philox(key=key).random_raw(self.num_samples)
            moved = np.arange(self.num_samples) / self.num_samples + self._jitter * (draws / 2.0**64 - 0.5)
            found = self._sorted = epoch, self._ranked[np.argsort(moved, kind="stable")]
        return found[1][places]
