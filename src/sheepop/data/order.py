"""The order in which training sees its samples: endless, shuffled anew in every epoch, and computed by position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import Permutation, derive_seed


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
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        result = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(start + filled, self.num_samples)
            size = min(count - filled, self.num_samples - offset)
            permutation = Permutation(self.num_samples, derive_seed(self.seed, "data order", epoch))
            result[filled : filled + size] = permutation(np.arange(offset, offset + size, dtype=np.int64))
            filled += size
        return result
