"""Reads the beginning of a file: whole rows or lines within a limit on the transfer, and the names of its columns."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

from sheepop.core.errors import DataError
from sheepop.core.hub import Contents, Hub, HubFile
from sheepop.download.catalog import no_such
from sheepop.download.selection import Selection, data_type

_STEP = 2**20
_LEAST_BLOCK, _LARGEST_BLOCK = 2**12, 2**21
_ROWS_AT_ONCE = 1000
# Compressed data that expands more than this is not text, and would fill the disk.
_MOST_EXPANSION = 50
_DECOMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda raw: io.BufferedReader(
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)  # type: ignore[arg-type, unused-ignore]
    ),
}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Bytes to read for the names of columns. These compressions yield nothing before a whole block has arrived.
_BEGINNING, _BEGINNING_OF = 2**15, {".zst": 2**18, ".bz2": 2**20}


def can_be_cut(path: str) -> bool:
    """Whether the beginning of such a file is usable without the rest."""
    return data_type(path) not in ("", ".arrow")


def excerpt_name(path: str) -> str:
    """The path of the uncompressed excerpt of a file: ``a/b.jsonl.gz`` gives ``a/b.excerpt.jsonl``."""
    kind, name = data_type(path), PurePosixPath(path).name
    stem = name[: name.lower().rindex(kind)]
    return str(PurePosixPath(path).with_name(f"{stem}.excerpt{kind}"))


def take_excerpt(hub: Hub, contents: Contents, file: HubFile, target: Path, limit: int) -> bool:
    """Writes the beginning of `file` to `target`, transferring at most `limit` bytes.

    Returns whether at least one whole row or line was within the limit. Raises `DataError` for a damaged file.
    """
    if data_type(file.path) == ".parquet":
        return _copy_rows(hub.open(contents, file), file.path, target, limit)
    return _copy_lines(_beginning(hub, contents, file, limit), file.path, target, limit)


def first_bytes(hub: Hub, contents: Contents, file: HubFile, limit: int) -> bytes:
    """The decompressed beginning of a file, from at most `limit` transferred bytes."""
    return next(_pieces(_beginning(hub, contents, file, limit).read1, file.path), b"")


def _beginning(hub: Hub, contents: Contents, file: HubFile, limit: int) -> Any:
    """A decompressed stream of the first `limit` bytes of a file."""
    raw = io.BufferedReader(hub.open(contents, file, limit), _STEP)
    decompressed = _DECOMPRESSED.get(PurePosixPath(file.path).suffix.lower())
    return raw if decompressed is None else decompressed(raw)


def _pieces(read: Callable[[int], bytes], path: str) -> Iterator[bytes]:
    """Yields the pieces from `read` until its end, which may be in the middle of compressed data."""
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


def _copy_lines(stream: Any, path: str, target: Path, limit: int) -> bool:
    """Writes the whole lines of `stream`, or rows of CSV; returns whether there is any."""
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
            # In CSV, a line end between quotation marks belongs to a field.
            marks += line.count(b'"') if kind == ".csv" else 0
            if line.endswith(b"\n") and marks % 2 == 0:
                kept = length
            if length > limit * _MOST_EXPANSION + _STEP:
                raise DataError(f"{path} grows more than {_MOST_EXPANSION} times when decompressed. It is not text.")
        output.truncate(kept)
    return kept > 0


def _copy_rows(remote: Any, path: str, target: Path, limit: int) -> bool:
    """Writes the rows in the first `limit` bytes of the file; returns whether there is any."""
    block = min(max(limit // 64, _LEAST_BLOCK), _LARGEST_BLOCK)
    rows = 0
    with _parquet(path) as arrow:
        file = arrow.parquet.ParquetFile(remote, pre_buffer=False, buffer_size=block)
        with arrow.parquet.ParquetWriter(target, file.schema_arrow, compression="zstd") as writer:
            for batch in _batches(file, limit):
                writer.write_batch(batch)
                rows += batch.num_rows
    return rows > 0


def _batches(file: Any, limit: int) -> Iterator[Any]:
    """Yields the first rows, as many as fit in `limit` bytes if the rows of a row group have equal sizes."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        size = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
        wanted = group.num_rows if size <= limit else group.num_rows * limit // size
        # Batches of equal size, so that the last one reads hardly more than needed.
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


def text_column(hub: Hub, selection: Selection) -> tuple[str | None, list[str]]:
    """The text column (None if ambiguous) and all columns; raises `DataError` if the requested one does not exist."""
    path, wanted = selection.files[0].path, selection.request.column
    found = _columns(hub, selection)
    if wanted is not None and found and wanted not in found:
        raise DataError(no_such(path, "column", wanted, list(found)))
    if wanted is not None and data_type(path) == ".txt":
        raise DataError(f"{path} is plain text and has no column {wanted!r}. Leave it out.")
    texts = [name for name, is_text in found.items() if is_text]
    meant_only = "text" if "text" in texts else texts[0] if len(texts) == 1 else None
    return wanted or meant_only, list(found)


def _columns(hub: Hub, selection: Selection) -> dict[str, bool]:
    """The name of each column, and whether it has strings; empty if the beginning of the file does not tell."""
    file, kind = selection.files[0], data_type(selection.files[0].path)
    if kind == ".parquet":
        with _parquet(file.path) as arrow:
            schema = arrow.parquet.read_schema(hub.open(selection.contents, file))
        texts = (arrow.types.is_string, arrow.types.is_large_string)
        return {field.name: any(is_text(field.type) for is_text in texts) for field in schema}
    if kind in (".txt", ".arrow") or not file.size:
        return {}
    length = _BEGINNING_OF.get(PurePosixPath(file.path).suffix.lower(), _BEGINNING)
    beginning = first_bytes(hub, selection.contents, file, length).decode("utf-8", errors="replace")
    try:
        if kind in _DELIMITERS:
            return dict.fromkeys(next(csv.reader(io.StringIO(beginning), delimiter=_DELIMITERS[kind]), []), True)
        # The first of JSON lines, or of an array.
        record, _ = json.JSONDecoder().raw_decode(beginning.lstrip("\ufeff \t\r\n["))
    except (csv.Error, ValueError, RecursionError):
        return {}
    return {name: isinstance(value, str) for name, value in record.items()} if isinstance(record, dict) else {}


@contextmanager
def _parquet(path: str) -> Iterator[Any]:
    """Imports pyarrow with Parquet; turns its errors on a damaged file into a `DataError` that names `path`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet files need the library pyarrow: pip install 'sheepop[data]'.") from None
    try:
        yield pyarrow
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}".rstrip(".") + ".") from None
