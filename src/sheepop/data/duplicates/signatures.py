"""MinHash signatures: a few numbers per document from which similar documents are found without comparing all.

Broder 1997, "On the resemblance and containment of documents".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import derive_seed
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.shingles import Hashes, distinct, shingles_of_words, word_hashes

# Documents without text to compare agree with nothing; their minima are never looked at.
_NO_MINIMUM = np.uint32(2**32 - 1)
_BLOCK_SHINGLES = 1024
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Signature:
    """What is kept of a document: a hash for each band, ``(bands,)``, and the number of its distinct shingles.

    A document that is not to be compared has no shingles, whatever its bands say.
    """

    bands: Hashes
    num_shingles: int


def document_signature(text: str, kind: str, config: NearDuplicatesConfig) -> Signature:
    """The signature of a text; `kind` is ``prose``, ``code``, ``table`` or ``chat``."""
    compared = compared_shingles(text, kind, config)
    return Signature(band_hashes(minima(compared, config.bands * config.rows), config.bands), compared.size)


def compared_shingles(text: str, kind: str, config: NearDuplicatesConfig) -> Hashes:
    """The distinct shingles by which a text is compared, ascending; none when it is too short to be compared."""
    hashes = word_hashes(text, kind)
    if hashes.size < config.min_words:
        return hashes[:0]
    return distinct(shingles_of_words(hashes, kind, config.shingle_words))


def minima(shingle_hashes: Hashes, permutations: int) -> NDArray[np.uint32]:
    """The least value under each of the random permutations of 32-bit numbers, ``(permutations,)``.

    A permutation is a multiplication by an odd number modulo 2^32. The shingles are hashes already, so this is
    enough for the share of equal minima to estimate the Jaccard similarity without bias.
    """
    factors = _factors(permutations)[:, None]
    least = np.full(permutations, _NO_MINIMUM, np.uint32)
    values = (shingle_hashes >> _HALF).astype(np.uint32)
    for start in range(0, values.size, _BLOCK_SHINGLES):
        permuted = factors * values[None, start : start + _BLOCK_SHINGLES]
        np.minimum(least, permuted.min(axis=1), out=least)
    return least


def band_hashes(least: NDArray[np.uint32], bands: int) -> Hashes:
    """One 64-bit hash for each band of consecutive minima, ``(bands,)``: equal when all its minima are."""
    rows = least.reshape(bands, -1).astype(np.uint64)
    factors = _band_factors(rows.shape[1])
    sums: Hashes = (rows * factors).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> _HALF)


def _raw(purpose: str, count: int) -> Hashes:
    raw = np.random.Philox(key=derive_seed(0, "minhash", purpose)).random_raw(count)
    return np.asarray(raw, dtype=np.uint64)


@cache
def _factors(permutations: int) -> NDArray[np.uint32]:
    return (_raw("permutations", permutations) >> _HALF).astype(np.uint32) | np.uint32(1)


@cache
def _band_factors(rows: int) -> Hashes:
    return _raw("bands", rows) | np.uint64(1)
