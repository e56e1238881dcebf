"""Token shards: the tokens of a split as plain little-endian integers on disk, written once, read by position.

Nothing is mapped into memory: a file that is deleted or cut short while it is used ends in a `DataError` that names it,
and not in the signal that a map would bring.

``tokens/train-00000.bin`` and on hold the tokens of whole documents, one after the other; ``tokens/train.idx`` holds
where each document begins in the split (int64), with the number of all tokens as its last entry.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sheepop.core.errors import DataError

FILE_PREFIX = {"train": "train", "validation": "val"}
SHARD_TOKENS = 2**27
_INDEX_TYPE = np.dtype("<i8")
_LARGEST_READ = 2**30
_RESTORE = "Put the corpus back as it was, or build it again, and resume the run (--resume)."

Tokens = NDArray[np.unsignedinteger[Any]]


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The storage type of token ids below `vocab_size`: uint16 up to 65,536, else uint32; little endian."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class TokenWriter:
    """Streams documents' token ids to the shards of one split; a document never lies in two shards.

    A shard ends with the document that fills it to `shard_tokens`. Close it, then `summary` is the split's entry
    in the manifest.
    """

    def __init__(self, directory: Path, prefix: str, dtype: np.dtype[Any], *, shard_tokens: int = SHARD_TOKENS) -> None:
        self._directory, self._prefix, self._dtype, self._shard_tokens = directory, prefix, dtype, shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._shard: _HashedFile | None = None
        self._index = _HashedFile(directory / f"{prefix}.idx")
        self._index.write(np.zeros(1, _INDEX_TYPE).tobytes())
        self.num_documents = self.num_tokens = self.num_bytes = 0

    def write(self, token_ids: ArrayLike, num_bytes: int = 0) -> None:
        """Appends one document of at least one token; `num_bytes` is the UTF-8 length of its text."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"a document is a list of at least one integer, got {ids.dtype} of shape {ids.shape}")
        if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(self._dtype).max:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit into {self._dtype.name}")
        if self._shard is None:
            self._shard = _HashedFile(self._directory / f"{self._prefix}-{len(self._shards):05d}.bin")
        self._shard.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += ids.size
        self.num_documents += 1
        self.num_bytes += num_bytes
        self._index.write(np.array([self.num_tokens], _INDEX_TYPE).tobytes())
        if self._shard.size >= self._shard_tokens * self._dtype.itemsize:
            self._finish_shard()

    def close(self) -> None:
        """Finishes the last shard and the index."""
        self._finish_shard()
        self._index.close()

    def summary(self) -> dict[str, Any]:
        """Counts, and every file with its size and SHA-256."""
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "shards": self._shards,
            "index": {"file": self._index.path.name, "sha256": self._index.sha256()},
        }

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            tokens = self._shard.size // self._dtype.itemsize
            self._shards.append({"file": self._shard.path.name, "tokens": tokens, "sha256": self._shard.sha256()})
        self._shard = None

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of one split: `shards` end to end, document i at ``offsets[i]:offsets[i + 1]``.

    Tokens stay on disk until they are asked for, so a split may be larger than memory; offsets, eight bytes a
    document, are held. Shards given as arrays work as well. `num_bytes` is the UTF-8 length of the documents' text.
    """

    shards: Sequence[Tokens | ShardFile]
    offsets: NDArray[np.int64]
    num_bytes: int = 0

    def __post_init__(self) -> None:
        total = int(self._shard_starts[-1])
        if len(self.offsets) == 0 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != total:
            raise DataError(f"The document offsets do not span the {total:,} tokens of the shards.")

    @classmethod
    def from_documents(cls, documents: Sequence[ArrayLike], num_bytes: int = 0) -> TokenSplit:
        """A split in memory from the token ids of its documents, none of them empty."""
        arrays = [np.asarray(document, dtype=np.uint32) for document in documents]
        if any(array.ndim != 1 or array.size == 0 for array in arrays):
            raise ValueError("a document is a list of at least one token id")
        offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        return cls([np.concatenate(arrays)] if arrays else [], offsets, num_bytes)

    @classmethod
    def open(cls, directory: Path, summary: Mapping[str, Any], dtype: np.dtype[Any]) -> TokenSplit:
        """Opens the files that a `TokenWriter` named in `summary`; raises `DataError` when one has the wrong size."""
        shards = [_checked(directory, s["file"], dtype, s["tokens"]) for s in summary["shards"]]
        index = _checked(directory, summary["index"]["file"], _INDEX_TYPE, summary["documents"] + 1)
        return cls(shards, index[0 : len(index)].astype(np.int64), summary["bytes"])

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens there are, ``<eos>`` included."""
        return int(self.offsets[-1])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start:stop`` of the split, ``(stop - start,)``; raises IndexError outside of it."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} are outside a split of {self.num_tokens}")
        starts = self._shard_starts
        first = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
        pieces = []
        for shard, begin in zip(self.shards[first:], starts[first:], strict=False):
            if begin >= stop:
                break
            pieces.append(shard[max(0, start - int(begin)) : stop - int(begin)])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def document(self, index: int) -> Tokens:
        """The tokens of document `index`."""
        return self.tokens(int(self.offsets[index]), int(self.offsets[index + 1]))

    @cached_property
    def _shard_starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(shard) for shard in self.shards)], dtype=np.int64)


@dataclass(frozen=True)
class ShardFile:
    """`count` numbers of one type in a file, read slice by slice; safe to use from several threads."""

    path: Path
    dtype: np.dtype[Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: slice) -> NDArray[Any]:
        """The numbers at consecutive places, from the disk; raises `DataError` when they are not there any more."""
        start, stop, _ = places.indices(self.count)
        wanted = max(0, stop - start) * self.dtype.itemsize
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = _read_at(descriptor, start * self.dtype.itemsize, wanted)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise DataError(f"{self.path} has disappeared since it was opened. {_RESTORE}") from None
        except OSError as error:
            raise DataError(f"{self.path} can no longer be read: {error.strerror}. {_RESTORE}") from None
        if len(data) < wanted:
            raise DataError(
                f"{self.path} was cut short after it was opened: it had {self.count:,} entries, and some of the "
                f"bytes for {start:,} to {stop:,} are missing. {_RESTORE}"
            )
        return np.frombuffer(data, self.dtype)


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file: IO[bytes] = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> None:
        self._file.close()

    def sha256(self) -> str:
        return self._hash.hexdigest()


def _checked(directory: Path, name: str, dtype: np.dtype[Any], count: int) -> ShardFile:
    """The file, which must have the size that was written."""
    if Path(name).name != name:
        raise DataError(f"The manifest above {directory} is damaged: {name!r} is not a file name.")
    path = directory / name
    try:
        size = path.stat().st_size
    except OSError:
        raise DataError(f"{path} is missing. Build the corpus again.") from None
    if size != count * dtype.itemsize:
        raise DataError(
            f"{path} is damaged: it has {size:,} bytes where {count:,} entries of {dtype.itemsize} were written. "
            "Build the corpus again."
        )
    return ShardFile(path, dtype, count)


def _read_at(descriptor: int, position: int, size: int) -> bytes:
    """The bytes at a position of a file, fewer only where it ends; one call reads at most 2 GiB."""
    pieces = []
    while size and (piece := os.pread(descriptor, min(size, _LARGEST_READ), position)):
        pieces.append(piece)
        position, size = position + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
