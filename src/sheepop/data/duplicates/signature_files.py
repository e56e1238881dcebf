"""Signatures on disk: for each document of a part its id, length, number of shingles and bands, column by column."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.signatures import Signature, document_signature

# The columns before the bands: both halves of the id, UTF-8 bytes, number of distinct shingles.
ID, NUM_BYTES, NUM_SHINGLES, FIRST_BAND = slice(0, 2), 2, 3, 4
# A file is a sequence of blocks of this many documents, the last one shorter; within a block a column is contiguous,
# so that a band of all documents is read without the others.
BLOCK_DOCUMENTS = 2**15
_WORD = np.dtype("<u8")
_MAGIC = int.from_bytes(b"sheepsig", "little")
_FORMAT_VERSION = 1
_HEADER_WORDS = 4

Block = NDArray[np.uint64]


class SignatureWriter:
    """Writes the signatures of one part to `path`, which appears whole when it is closed without an error.

    Without a `config` documents can be compared for being equal only. Holds at most one block of documents.
    """

    def __init__(self, path: Path, config: NearDuplicatesConfig | None) -> None:
        self._path, self._config = path, config
        self._partial = path.with_name(f".{path.name}.partial")
        self._columns = FIRST_BAND + (config.bands if config else 0)
        self._block: Block = np.zeros((self._columns, BLOCK_DOCUMENTS), np.uint64)
        self._num_waiting = self._num_documents = 0
        with storage_errors(path):
            self._file = self._partial.open("wb")
            self._file.write(bytes(_HEADER_WORDS * _WORD.itemsize))

    def add(self, document: Document) -> None:
        """Computes the signature of one document and appends it."""
        signature = None
        if self._config:
            signature = document_signature(document.text, document.kind, self._config)
        self.add_signature(document.id, document.num_bytes, signature)

    def add_signature(self, document_id: str, num_bytes: int, signature: Signature | None) -> None:
        """Appends the signature of the document with this id and length; None where there are no settings."""
        column = self._block[:, self._num_waiting]
        column[ID] = np.frombuffer(bytes.fromhex(document_id), ">u8")
        column[NUM_BYTES] = num_bytes
        column[NUM_SHINGLES] = signature.num_shingles if signature else 0
        if signature:
            column[FIRST_BAND:] = signature.bands
        self._num_waiting += 1
        if self._num_waiting == BLOCK_DOCUMENTS:
            self._flush()

    def close(self) -> None:
        """Finishes the file."""
        self._flush()
        header = np.array([_MAGIC, self._columns, self._num_documents, _fingerprint(self._config)], _WORD)
        with storage_errors(self._path):
            self._file.seek(0)
            self._file.write(header.tobytes())
            self._file.close()
            self._partial.replace(self._path)

    def abandon(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        with storage_errors(self._path):
            self._file.write(self._block[:, : self._num_waiting].astype(_WORD, copy=False).tobytes())
        self._num_documents += self._num_waiting
        self._num_waiting = 0

    def __enter__(self) -> SignatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


@dataclass(frozen=True, slots=True)
class PartSignatures:
    """The finished signatures of one part; open them with `PartSignatures.open`.

    The documents of a `protected` part are compared with and never removed.
    """

    path: Path
    num_documents: int
    num_bands: int
    protected: bool = False

    @classmethod
    def open(cls, path: Path, config: NearDuplicatesConfig | None, *, protected: bool = False) -> PartSignatures:
        """Reads the header; raises `DataError` when the file is damaged or was made under other settings."""
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

    def blocks(self, first: int, last: int) -> Iterator[Block]:
        """The columns ``first .. last - 1``, block by block of documents, each ``(last - first, N)``."""
        columns = FIRST_BAND + self.num_bands
        for start in range(0, self.num_documents, BLOCK_DOCUMENTS):
            size = min(BLOCK_DOCUMENTS, self.num_documents - start)
            offset = (_HEADER_WORDS + start * columns + first * size) * _WORD.itemsize
            numbers = np.fromfile(self.path, _WORD, (last - first) * size, offset=offset)
            if numbers.size != (last - first) * size:
                raise DataError(f"{self.path} got shorter while it was in use. Run the command again.")
            yield numbers.astype(np.uint64, copy=False).reshape(last - first, size)


def _fingerprint(config: NearDuplicatesConfig | None) -> int:
    """A number that differs between settings under which signatures differ."""
    settings = (config.shingle_words, config.min_words, config.bands, config.rows) if config else ()
    digest = hashlib.blake2b(repr((_FORMAT_VERSION, settings)).encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
