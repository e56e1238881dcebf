"""MinHash signatures, which find similar documents without comparing all pairs, and their files.

Broder 1997, "On the resemblance and containment of documents". A file has the id, length, number of shingles and bands
of each document of a part, column by column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors
from sheepop.core.random import derive_seed
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.shingles import Hashes, distinct, shingles_of_words, word_hashes

# The minimum of documents without shingles; it is never compared.
_NO_MINIMUM = np.uint32(2**32 - 1)
_BLOCK_SHINGLES = 1024
_HALF = np.uint64(32)
# The columns before the bands: the two halves of the id, UTF-8 bytes, number of distinct shingles.
ID, NUM_BYTES, NUM_SHINGLES, FIRST_BAND = (0, 1), 2, 3, 4
# A file is a sequence of blocks of this many documents, the last one shorter. Columns are contiguous within a block, so
# that one band of all documents can be read without the others.
BLOCK_DOCUMENTS = 2**15
_WORD = np.dtype("<u8")
_MAGIC = int.from_bytes(b"sheepsig", "little")
_FORMAT_VERSION = 1
_HEADER_WORDS = 4

Block = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Signature:
    """A hash for each band, ``(bands,)``, and the number of distinct shingles, 0 if too few words to compare."""

    bands: Hashes
    num_shingles: int


def document_signature(text: str, kind: str, config: NearDuplicatesConfig) -> Signature:
    """The signature of a text of one `kind`, see `Document`."""
    compared = compared_shingles(text, kind, config)
    return Signature(band_hashes(minima(compared, config.bands * config.rows), config.bands), compared.size)


def compared_shingles(text: str, kind: str, config: NearDuplicatesConfig) -> Hashes:
    """The distinct shingles of a text, ascending; none if it is too short to compare."""
    hashes = word_hashes(text, kind)
    if hashes.size < config.min_words:
        return hashes[:0]
    return distinct(shingles_of_words(hashes, kind, config.shingle_words))


def minima(shingle_hashes: Hashes, permutations: int) -> NDArray[np.uint32]:
    """The minimum under each of `permutations` random permutations of 32-bit numbers, ``(permutations,)``.

    A permutation is a multiplication by an odd number modulo 2^32. As shingles are hashes already, this suffices for
    the share of equal minima to be an unbiased estimate of the Jaccard similarity.
    """
    factors = ((_raw("permutations", permutations) >> _HALF).astype(np.uint32) | np.uint32(1))[:, None]
    least = np.full(permutations, _NO_MINIMUM, np.uint32)
    values = (shingle_hashes >> _HALF).astype(np.uint32)
    for start in range(0, values.size, _BLOCK_SHINGLES):
        permuted = factors * values[None, start : start + _BLOCK_SHINGLES]
        np.minimum(least, permuted.min(axis=1), out=least)
    return least


def band_hashes(least: NDArray[np.uint32], bands: int) -> Hashes:
    """One 64-bit hash for each band of consecutive minima, ``(bands,)``, equal if all its minima are equal."""
    rows = least.reshape(bands, -1).astype(np.uint64)
    factors = _raw("bands", rows.shape[1]) | np.uint64(1)
    sums: Hashes = (rows * factors).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> _HALF)


@cache
def _raw(purpose: str, count: int) -> Hashes:
    return np.asarray(np.random.Philox(key=derive_seed(0, "minhash", purpose)).random_raw(count), dtype=np.uint64)


class SignatureWriter(AbstractContextManager["SignatureWriter"]):
    """Writes the signatures of one part, a block at a time; without `config`, only for finding equal documents."""

    def __init__(self, path: Path, config: NearDuplicatesConfig | None) -> None:
        self._path, self._config = path, config
        self._columns = FIRST_BAND + (config.bands if config else 0)
        self._block: Block = np.zeros((self._columns, BLOCK_DOCUMENTS), np.uint64)
        self._num_waiting = self._num_documents = 0
        with storage_errors(path):
            self._file = path.open("wb")
            self._file.write(bytes(_HEADER_WORDS * _WORD.itemsize))

    def add(self, document: Document) -> None:
        """Computes and appends the signature of one document."""
        column = self._block[:, self._num_waiting]
        column[: len(ID)] = np.frombuffer(bytes.fromhex(document.id), ">u8")
        column[NUM_BYTES] = document.num_bytes
        if self._config:
            signature = document_signature(document.text, document.kind, self._config)
            column[NUM_SHINGLES], column[FIRST_BAND:] = signature.num_shingles, signature.bands
        self._num_waiting += 1
        if self._num_waiting == BLOCK_DOCUMENTS:
            self._flush()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with storage_errors(self._path), self._file:
            if kind is None:
                self._flush()
                header = np.array([_MAGIC, self._columns, self._num_documents, _fingerprint(self._config)], _WORD)
                self._file.seek(0)
                self._file.write(header.tobytes())

    def _flush(self) -> None:
        with storage_errors(self._path):
            self._file.write(self._block[:, : self._num_waiting].astype(_WORD, copy=False).tobytes())
        self._num_documents += self._num_waiting
        self._num_waiting = 0


@dataclass(frozen=True, slots=True)
class PartSignatures:
    """The finished signatures of one part; documents of a `protected` one are compared but never removed."""

    path: Path
    num_documents: int
    num_bands: int
    protected: bool = False

    @classmethod
    def open(cls, path: Path, config: NearDuplicatesConfig | None, *, protected: bool = False) -> PartSignatures:
        """Reads the header; raises `DataError` if the file is damaged or was made with other settings."""
        try:
            header = np.fromfile(path, _WORD, _HEADER_WORDS).tolist()
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Run the command again.") from None
        if len(header) < _HEADER_WORDS or header[0] != _MAGIC:
            raise DataError(f"{path} is damaged: it does not begin like a signature file. Remove it and build again.")
        _, columns, num_documents, fingerprint = header
        if fingerprint != _fingerprint(config):
            raise DataError(f"{path} has signatures made with other settings. Remove it and build again.")
        if size != (_HEADER_WORDS + columns * num_documents) * _WORD.itemsize:
            raise DataError(f"{path} is damaged: its size is {size:,} bytes. Remove it and build again.")
        return cls(path, num_documents, columns - FIRST_BAND, protected)

    def blocks(self, *columns: int) -> Iterator[Block]:
        """Yields the given columns in blocks of documents, each ``(columns, N)``."""
        num_columns = FIRST_BAND + self.num_bands
        for start in range(0, self.num_documents, BLOCK_DOCUMENTS):
            size = min(BLOCK_DOCUMENTS, self.num_documents - start)
            block = np.empty((len(columns), size), np.uint64)
            for row, column in zip(block, columns, strict=True):
                offset = (_HEADER_WORDS + start * num_columns + column * size) * _WORD.itemsize
                numbers = np.fromfile(self.path, _WORD, size, offset=offset)
                if numbers.size != size:
                    raise DataError(f"{self.path} got shorter while it was in use. Run the command again.")
                row[:] = numbers
            yield block


def numbered_blocks(parts: Iterable[PartSignatures], *columns: int) -> Iterator[tuple[PartSignatures, int, Block]]:
    """Yields the blocks of all parts, each with its part and the index of its first document among all parts."""
    start = 0
    for part in parts:
        for block in part.blocks(*columns):
            yield part, start, block
            start += block.shape[1]


def _fingerprint(config: NearDuplicatesConfig | None) -> int:
    settings = (config.shingle_words, config.min_words, config.bands, config.rows) if config else ()
    digest = hashlib.blake2b(repr((_FORMAT_VERSION, settings)).encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
