"""The beginning of a file, as much as a limit on the transfer allows: whole rows of Parquet, whole lines of text."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import zstandard

from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors
from sheepop.data.download.hub import Contents, Hub, HubFile
from sheepop.data.download.selection import data_type

_STEP = 2**20
_LEAST_BLOCK, _LARGEST_BLOCK = 2**12, 2**21
_ROWS_AT_ONCE = 1000
# Compressed text that grows more than this is no text, and would fill the disk.
_MOST_EXPANSION = 50
_BY_LINES = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_DECOMPRESSED: dict[str, Callable[[Any], IO[bytes]]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),  # type: ignore[dict-item, return-value, unused-ignore]
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda raw: io.BufferedReader(
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)  # type: ignore[arg-type, unused-ignore]
    ),
}
EXCERPT = ".excerpt"


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
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if data_type(file.path) == ".parquet":
            return _copy_rows(hub.open(contents, file, cache="none"), file.path, target, limit) > 0
        return _copy_lines(_beginning(hub, contents, file, limit), file.path, target, limit) > 0


def first_bytes(hub: Hub, contents: Contents, file: HubFile, limit: int) -> bytes:
    """The beginning of a file, decompressed, of which at most `limit` bytes are transferred."""
    return next(_pieces(_beginning(hub, contents, file, limit).read1, file.path), b"")


def _beginning(hub: Hub, contents: Contents, file: HubFile, limit: int) -> Any:
    """The first `limit` bytes of a file as a stream of what they hold, decompressed."""
    raw = io.BufferedReader(hub.open(contents, file, limit), _STEP)
    decompressed = _DECOMPRESSED.get(PurePosixPath(file.path).suffix.lower())
    return raw if decompressed is None else decompressed(raw)


def _pieces(read: Callable[[int], bytes], path: str) -> Iterator[bytes]:
    """What `read` gives, piece by piece, as far as it goes: it ends where the limit is, within compressed data."""
    while True:
        try:
            piece = read(_STEP)
        except EOFError:
            return
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{path} is damaged: {error}.") from None
        if not piece:
            return
        yield piece


def _copy_lines(stream: Any, path: str, target: Path, limit: int) -> int:
    """Writes the whole lines of `stream`, or rows of CSV; returns how many bytes they are."""
    kind = data_type(path)
    kept = length = marks = 0
    begun = kind != ".json"
    with target.open("wb") as output:
        for line in _pieces(stream.readline, path):
            if not begun and line.strip():
                begun = True
                if line.lstrip().startswith(b"["):
                    raise DataError(f"{path} is a single JSON array, which cannot be read in part. Raise the limit.")
            output.write(line)
            length += len(line)
            # In CSV a line end between quotation marks is part of a field.
            marks += line.count(b'"') if kind == ".csv" else 0
            if line.endswith(b"\n") and marks % 2 == 0:
                kept = length
            if length > limit * _MOST_EXPANSION + _STEP:
                raise DataError(f"{path} grows more than {_MOST_EXPANSION} times when decompressed. It is not text.")
        output.truncate(kept)
    return kept


def _copy_rows(remote: Any, path: str, target: Path, limit: int) -> int:
    """Writes the rows that lie in the first `limit` bytes of the file; returns how many."""
    _, parquet = parquet_library()
    block = min(max(limit // 64, _LEAST_BLOCK), _LARGEST_BLOCK)
    rows = 0
    with damaged_parquet(path):
        file = parquet.ParquetFile(remote, pre_buffer=False, buffer_size=block)
        with parquet.ParquetWriter(target, file.schema_arrow, compression="zstd") as writer:
            for batch in _batches(file, limit):
                writer.write_batch(batch)
                rows += batch.num_rows
    return rows


def _batches(file: Any, limit: int) -> Iterator[Any]:
    """Rows from the first on, as many as `limit` bytes hold when those of one row group are equally large."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        size = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
        wanted = group.num_rows if size <= limit else group.num_rows * limit // size
        # Batches of one size, so that the last one hardly reads more than is wanted.
        at_once = -(-wanted // -(-wanted // _ROWS_AT_ONCE)) if wanted else 0
        batches = file.iter_batches(batch_size=at_once, row_groups=[number], use_threads=False) if wanted else ()
        for batch in batches:
            yield batch.slice(0, wanted)
            wanted -= batch.num_rows
            if wanted <= 0:
                break
        limit -= size
        if limit <= 0:
            return


@contextmanager
def damaged_parquet(path: str) -> Iterator[None]:
    """What pyarrow says of a damaged file within the block becomes a `DataError` that names `path`."""
    arrow, _ = parquet_library()
    try:
        yield
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}".rstrip(".") + ".") from None


def parquet_library() -> tuple[Any, Any]:
    """pyarrow and its part for Parquet; raises `DataError` where it is not installed."""
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError("Parquet files need the library pyarrow: pip install 'sheepop[data]'.") from None
    return pyarrow, pyarrow.parquet
