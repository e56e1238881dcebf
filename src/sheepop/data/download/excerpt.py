"""The beginning of a file, as much as a limit on the transfer allows: whole rows of Parquet, whole lines of text."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import zstandard

from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors
from sheepop.data.download.hub import Contents, Hub, HubFile
from sheepop.data.download.parquet import copy_rows
from sheepop.data.download.remote import RemoteFile
from sheepop.data.download.selection import data_type

_STEP = 2**20
_LEAST_BLOCK, _LARGEST_BLOCK = 2**12, 2**21
# Compressed text that grows more than this is no text, and would fill the disk.
_MOST_EXPANSION = 50
_BY_LINES = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
EXCERPT = ".excerpt"


class _Decompressed(Protocol):
    def read1(self, size: int, /) -> bytes:
        """At least one byte of what follows, and none at the end."""


def can_be_cut(path: str) -> bool:
    """Whether the beginning of such a file is of use without the rest."""
    return data_type(path) in (*_BY_LINES, ".parquet")


def excerpt_name(path: str) -> str:
    """The path of the excerpt of a file, which is never compressed: ``a/b.jsonl.gz`` gives ``a/b.excerpt.jsonl``."""
    kind = data_type(path)
    name = PurePosixPath(path).name
    stem = name[: name.lower().rindex(kind)]
    return str(PurePosixPath(path).with_name(f"{stem}{EXCERPT}{kind}"))


def take_excerpt(hub: Hub, contents: Contents, file: HubFile, target: Path, limit: int) -> bool:
    """Writes the beginning of `file` to `target`, transferring at most `limit` bytes.

    Returns whether a whole row or line came within them. Raises `DataError` for a damaged file.
    """

    def fetch(start: int, stop: int) -> bytes:
        return hub.fetch(contents, file, start, stop)

    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if data_type(file.path) == ".parquet":
            block = min(max(limit // 64, _LEAST_BLOCK), _LARGEST_BLOCK)
            remote = RemoteFile(fetch, file.size, block=block, limit=limit)
            return copy_rows(remote, target, file.path) > 0
        return _copy_lines(_Limited(fetch, min(limit, file.size)), file.path, target, limit) > 0


def first_bytes(hub: Hub, contents: Contents, file: HubFile, limit: int) -> bytes:
    """The beginning of a file, decompressed, of which at most `limit` bytes are transferred."""
    source = _Limited(lambda start, stop: hub.fetch(contents, file, start, stop), min(limit, file.size))
    return next(_plain(source, file.path), b"")


class _Limited(io.RawIOBase):
    """The first bytes of a remote file, read from beginning to end."""

    def __init__(self, fetch: Callable[[int, int], bytes], limit: int) -> None:
        super().__init__()
        self._fetch, self._limit = fetch, limit
        self._waiting = b""
        self.transferred = 0

    def readable(self) -> bool:
        """It is read from the front to the end."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; none at the limit."""
        if not self._waiting and self.transferred < self._limit:
            self._waiting = self._fetch(self.transferred, min(self.transferred + _STEP, self._limit))
            self.transferred += len(self._waiting)
        view = memoryview(buffer).cast("B")
        piece, self._waiting = self._waiting[: len(view)], self._waiting[len(view) :]
        view[: len(piece)] = piece
        return len(piece)


def _copy_lines(source: _Limited, path: str, target: Path, limit: int) -> int:
    """Writes the whole lines of `source`; returns how many bytes they are."""
    kept = length = 0
    cut = _RowEnds() if data_type(path) == ".csv" else _LineEnds()
    with target.open("wb") as output:
        for chunk in _plain(source, path):
            if length == 0 and data_type(path) == ".json" and chunk.lstrip()[:1] == b"[":
                raise DataError(f"{path} is a single JSON array, which cannot be read in part. Raise the limit.")
            output.write(chunk)
            end = cut.last(chunk)
            kept = kept if end is None else length + end
            length += len(chunk)
            if length > limit * _MOST_EXPANSION + _STEP:
                raise DataError(f"{path} grows more than {_MOST_EXPANSION} times when decompressed. It is not text.")
        output.truncate(kept)
    return kept


def _plain(source: _Limited, path: str) -> Iterator[bytes]:
    """The decompressed bytes of `source`, as far as they go: it ends where the limit is, within compressed data."""
    stream = _opened(source, path)
    while True:
        try:
            chunk = stream.read1(_STEP)
        except EOFError:
            return
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{path} is damaged: {error}.") from None
        if not chunk:
            return
        yield chunk


def _opened(source: _Limited, path: str) -> _Decompressed:
    suffix = PurePosixPath(path).suffix.lower()
    raw = io.BufferedReader(source, _STEP)
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if suffix == ".bz2":
        return bz2.BZ2File(raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        reader: _Decompressed = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return reader
    return raw


class _LineEnds:
    """Finds where the last whole line of each chunk ends."""

    def last(self, chunk: bytes) -> int | None:
        """Bytes up to and with the last line end of `chunk`; None when it has none."""
        return chunk.rfind(b"\n") + 1 or None


class _RowEnds:
    """Finds where the last whole row of CSV ends: a line end between quotation marks is part of a field."""

    def __init__(self) -> None:
        self._quoted = False

    def last(self, chunk: bytes) -> int | None:
        """Bytes up to and with the last line end of `chunk` that ends a row; None when it has none."""
        place = None
        start = 0
        for piece in chunk.split(b'"'):
            end = -1 if self._quoted else piece.rfind(b"\n")
            place = place if end < 0 else start + end + 1
            start += len(piece) + 1
            self._quoted = not self._quoted
        # There is one mark less than there are pieces.
        self._quoted = not self._quoted
        return place
