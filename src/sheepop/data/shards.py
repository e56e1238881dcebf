"""Token shards: the tokens of a split as little-endian integers on disk, written once and read by position.

Files are not memory-mapped: if one is deleted or truncated during use, a `DataError` names it, where a map would raise
a signal.

``tokens/train-00000.bin`` and following contain the tokens of whole documents, end to end. ``tokens/train.idx`` has the
offset of each document in the split (int64), and the total number of tokens as its last entry. ``tokens/train.src`` has
the number of each document's source file (int32), and ``tokens/train.sources.json`` the names of these files in order
of first occurrence. Corpora of format 2 and older lack the last two; their documents name the source.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, sha256_file, write_json

FILE_PREFIX = {"train": "train", "validation": "val"}
_INDEX_TYPE, _SOURCE_TYPE = np.dtype("<i8"), np.dtype("<i4")
_LARGEST_READ = 2**30  # a call reads at most 2 GiB
_RESTORE = "Put the corpus back as it was, or build it again, and resume the run (--resume)."

Tokens = NDArray[np.unsignedinteger[Any]]


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The storage type for a vocabulary size: little-endian uint16 up to 65,536, else uint32."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class TokenWriter:
    """Streams documents to the shard ``prefix.bin`` and their offsets to ``prefix.idx``, in a ``with`` block."""

    def __init__(self, directory: Path, prefix: str, dtype: np.dtype[Any]) -> None:
        self._shard_path, self._index_path = directory / f"{prefix}.bin", directory / f"{prefix}.idx"
        self._shard, self._dtype = self._shard_path.open("wb"), dtype
        self._offsets, self._num_bytes = array("q", [0]), 0

    def write(self, token_ids: ArrayLike, num_bytes: int = 0) -> None:
        """Appends one document of at least one token; `num_bytes` is the UTF-8 length of its text."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"a document is a list of at least one integer, got {ids.dtype} of shape {ids.shape}")
        if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(self._dtype).max:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit into {self._dtype.name}")
        self._shard.write(ids.astype(self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + ids.size)
        self._num_bytes += num_bytes

    def summary(self) -> dict[str, Any]:
        """The manifest entry of a split, after the block: counts, and both files with their SHA-256."""
        tokens, shard, index = self._offsets[-1], self._shard_path, self._index_path
        return {
            "documents": len(self._offsets) - 1,
            "tokens": tokens,
            "bytes": self._num_bytes,
            "shards": [{"file": shard.name, "tokens": tokens, "sha256": sha256_file(shard)}],
            "index": {"file": index.name, "sha256": sha256_file(index)},
        }

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._shard.close()
        self._index_path.write_bytes(np.asarray(self._offsets, _INDEX_TYPE).tobytes())


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The tokens of one split: `shards` end to end, document i at ``offsets[i]:offsets[i + 1]``.

    Tokens stay on disk until they are read, so a split may exceed memory; only offsets, eight bytes per document, are
    in memory. Shards may also be arrays. `num_bytes` is the UTF-8 length of the documents' text.
    """

    shards: Sequence[Tokens | ShardFile]
    offsets: NDArray[np.int64]
    num_bytes: int = 0

    def __post_init__(self) -> None:
        total = self._shard_starts[-1]
        if len(self.offsets) == 0 or (self.offsets[0], self.offsets[-1]) != (0, total):
            raise DataError(f"The document offsets do not span the {total:,} tokens of the shards.")

    @classmethod
    def from_documents(cls, documents: Sequence[ArrayLike], num_bytes: int = 0) -> TokenSplit:
        """Makes a split in memory from the token ids of its documents, none of them empty."""
        arrays = [np.asarray(document, dtype=np.uint32) for document in documents]
        if any(array.ndim != 1 or array.size == 0 for array in arrays):
            raise ValueError("a document is a list of at least one token id")
        offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        return cls([np.concatenate(arrays)] if arrays else [], offsets, num_bytes)

    @classmethod
    def open(cls, directory: Path, summary: Mapping[str, Any], dtype: np.dtype[Any]) -> TokenSplit:
        """Opens the files listed in `summary`; raises `DataError` if one is missing or has the wrong size."""
        shards = [_checked(directory, s["file"], dtype, s["tokens"]) for s in summary["shards"]]
        index = _checked(directory, summary["index"]["file"], _INDEX_TYPE, summary["documents"] + 1)
        return cls(shards, index[0 : len(index)].astype(np.int64), summary["bytes"])

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens, ``<eos>`` included."""
        return int(self.offsets[-1])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start:stop`` of the split, ``(stop - start,)``; raises IndexError if out of range."""
        starts = self._shard_starts
        if not 0 <= start <= stop <= starts[-1]:
            raise IndexError(f"tokens {start}:{stop} are outside a split of {self.num_tokens}")
        touched = range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, stop))
        pieces = [self.shards[n][max(0, start - starts[n]) : stop - starts[n]] for n in touched]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    @cached_property
    def _shard_starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.shards))]


@dataclass(frozen=True)
class ShardFile:
    """A file of `count` numbers of one type, read by slices; safe to use from several threads."""

    path: Path
    dtype: np.dtype[Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: slice) -> NDArray[Any]:
        """Reads a contiguous slice from disk; raises `DataError` if the file is gone or truncated."""
        start, stop, _ = places.indices(self.count)
        position, missing = start * self.dtype.itemsize, max(0, stop - start) * self.dtype.itemsize
        pieces = []
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while missing and (piece := os.pread(descriptor, min(missing, _LARGEST_READ), position)):
                    pieces.append(piece)
                    position, missing = position + len(piece), missing - len(piece)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise DataError(f"{self.path} has disappeared since it was opened. {_RESTORE}") from None
        except OSError as error:
            raise DataError(f"{self.path} can no longer be read: {error.strerror}. {_RESTORE}") from None
        if missing:
            raise DataError(
                f"{self.path} was cut short after it was opened: it had {self.count:,} entries, and some of the "
                f"bytes for {start:,} to {stop:,} are missing. {_RESTORE}"
            )
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), self.dtype)


def _checked(directory: Path, name: str, dtype: np.dtype[Any], count: int) -> ShardFile:
    """Opens a file after checking its name and size."""
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


@dataclass(frozen=True, eq=False)
class DocumentView:
    """The documents of a split with the ascending numbers `documents`; no tokens are copied."""

    split: TokenSplit
    documents: NDArray[np.int64]

    def __post_init__(self) -> None:
        numbers = self.documents
        if numbers.size and (numbers[0] < 0 or numbers[-1] >= self.split.num_documents or (np.diff(numbers) < 1).any()):
            raise ValueError(f"document numbers ascend from 0 to {self.split.num_documents - 1}")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """The offset of each document in the view, and the total as last entry."""
        lengths = self.split.offsets[self.documents + 1] - self.split.offsets[self.documents]
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the view."""
        return int(self.offsets[-1])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start:stop`` of the view, ``(stop - start,)``; raises IndexError if out of range."""
        pieces = [self.split.tokens(*places) for places in self.ranges(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges of the split that hold the tokens ``start:stop`` of the view; adjacent ranges are merged."""
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
"""The documents of a split or some of them; document i has the tokens ``offsets[i]:offsets[i + 1]``."""


@dataclass(frozen=True, eq=False)
class DocumentSources:
    """The file of document i is ``names[numbers[i]]``."""

    names: list[str]
    numbers: NDArray[np.int32]

    @classmethod
    def of_names(cls, sources: Iterable[str]) -> DocumentSources:
        """Makes the sources of documents from the file name of each."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(source, len(known)) for source in sources]
        return cls(list(known), np.array(numbers, dtype=_SOURCE_TYPE))

    @classmethod
    def joined(cls, parts: Iterable[DocumentSources]) -> DocumentSources:
        """Concatenates the sources of several parts."""
        known: dict[str, int] = {}
        numbers = [np.zeros(0, _SOURCE_TYPE)]
        for part in parts:
            renamed = [known.setdefault(name, len(known)) for name in part.names]
            numbers.append(np.array(renamed, dtype=_SOURCE_TYPE)[part.numbers])
        return cls(list(known), np.concatenate(numbers))

    def write(self, directory: Path, prefix: str) -> dict[str, Any]:
        """Writes both files; returns their manifest entry."""
        numbers, names = directory / f"{prefix}.src", directory / f"{prefix}.sources.json"
        numbers.write_bytes(self.numbers.astype(_SOURCE_TYPE).tobytes())
        write_json(names, self.names)
        return {
            "file": numbers.name,
            "sha256": sha256_file(numbers),
            "names": {"file": names.name, "sha256": sha256_file(names)},
        }

    @classmethod
    def read(cls, directory: Path, entry: Mapping[str, Any], num_documents: int) -> DocumentSources:
        """Reads the files of `write`; raises `DataError` that names a missing or damaged one."""
        path = directory / Path(entry["file"]).name
        names = read_json(directory / Path(entry["names"]["file"]).name, DataError)
        try:
            numbers = np.fromfile(path, _SOURCE_TYPE)
            is_whole = path.stat().st_size == num_documents * _SOURCE_TYPE.itemsize and isinstance(names, list)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Build the corpus again.") from None
        if not is_whole or (numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names)):
            raise DataError(f"{path} is damaged: it does not name a file for each document. Build the corpus again.")
        return cls([str(name) for name in names], numbers)
