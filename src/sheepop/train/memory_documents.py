"""The training documents that are reserved for the memory of a text, and those that are left to the network."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import numpy_generator
from sheepop.data.shards import DocumentView, TokenSource, TokenSplit
from sheepop.train.config import MemoryConfig

_SHARE = 50  # at most one token of so many is reserved


def reserved_documents(split: TokenSplit, config: MemoryConfig, seed: int) -> NDArray[np.int64]:
    """The numbers of the documents that training leaves out, ascending: drawn at random, as many as there is room for.

    Documents that are longer than the rest of the room are passed over, so a text of few documents may have none.
    """
    room, chosen = min(config.reserved_tokens, split.num_tokens // _SHARE), list[int]()
    lengths = np.diff(split.offsets)
    for number in numpy_generator(seed, "reserved documents").permutation(split.num_documents):
        if lengths[number] <= room:
            room -= int(lengths[number])
            chosen.append(int(number))
    return np.sort(np.array(chosen, dtype=np.int64))


def other_documents(source: TokenSource, reserved: NDArray[np.int64]) -> DocumentView:
    """The documents of a split, or of a view of one, that are not `reserved`."""
    split, documents = (
        (source.split, source.documents)
        if isinstance(source, DocumentView)
        else (source, np.arange(source.num_documents))
    )
    return DocumentView(split, np.setdiff1d(documents, reserved))
