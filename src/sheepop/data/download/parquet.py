"""Parquet read over the network: its columns from the end of the file, its rows from the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.data.download.remote import LimitReached, RemoteFile

_ROWS_AT_ONCE = 256
_WRITTEN_BYTES = 2**25


def columns(remote: RemoteFile, name: str) -> dict[str, bool]:
    """The columns of a Parquet file, and for each whether it holds strings; raises `DataError` for a damaged file."""
    arrow, parquet = _libraries()
    with _damage_named(name):
        schema = parquet.read_schema(remote)
    types = arrow.types
    return {field.name: types.is_string(field.type) or types.is_large_string(field.type) for field in schema}


def copy_rows(remote: RemoteFile, target: Path, name: str) -> int:
    """Writes the rows that can be read before the limit of `remote` is reached; returns how many."""
    arrow, parquet = _libraries()
    rows = 0
    with _damage_named(name):
        try:
            file = parquet.ParquetFile(remote, pre_buffer=False, buffer_size=remote.block)
        except LimitReached:
            return 0
        with parquet.ParquetWriter(target, file.schema_arrow, compression="zstd") as writer:
            waiting: list[Any] = []
            size = 0
            for batch in _batches(file):
                waiting.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
                if size >= _WRITTEN_BYTES:
                    writer.write_table(arrow.Table.from_batches(waiting))
                    waiting, size = [], 0
            if waiting:
                writer.write_table(arrow.Table.from_batches(waiting))
    return rows


def _batches(file: Any) -> Iterator[Any]:
    try:
        # Group by group: a batch that reached into the next one would be lost with it.
        for group in range(file.num_row_groups):
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], use_threads=False)
    except LimitReached:
        return


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    arrow, _ = _libraries()
    try:
        yield
    except arrow.ArrowInvalid as error:
        raise DataError(f"{name} is not a complete Parquet file: {error}".rstrip(".") + ".") from None


def _libraries() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError("Parquet files need the library pyarrow: pip install 'sheepop[data]'.") from None
    return pyarrow, pyarrow.parquet
