"""What rows of tokens are cut from: a whole split, or only some of its documents, as if they were all there is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sheepop.data.shards import Tokens, TokenSplit


@dataclass(frozen=True, eq=False)
class DocumentView:
    """The documents of a split whose numbers are in `documents`, ascending; no token is copied."""

    split: TokenSplit
    documents: NDArray[np.int64]

    def __post_init__(self) -> None:
        numbers = self.documents
        if numbers.size and (numbers[0] < 0 or numbers[-1] >= self.split.num_documents or (np.diff(numbers) < 1).any()):
            raise ValueError(f"document numbers ascend from 0 to {self.split.num_documents - 1}")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document begins in the view."""
        lengths = self.split.offsets[self.documents + 1] - self.split.offsets[self.documents]
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @property
    def num_tokens(self) -> int:
        """How many tokens the documents have."""
        return int(self.offsets[-1])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start:stop`` of the view, ``(stop - start,)``; raises IndexError outside of it."""
        pieces = [self.split.tokens(*places) for places in self.ranges(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens ``start:stop`` of the view stand in the split; neighbours there are one range."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} are outside a view of {self.num_tokens}")
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        found: list[tuple[int, int]] = []
        for number in range(first, last):
            shift = int(self.split.offsets[self.documents[number]]) - int(self.offsets[number])
            begin = max(start, int(self.offsets[number])) + shift
            end = min(stop, int(self.offsets[number + 1])) + shift
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
        return found


TokenSource = TokenSplit | DocumentView
"""Documents end to end, document i at ``offsets[i]:offsets[i + 1]``."""
