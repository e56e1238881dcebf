"""Turns Parquet and Arrow files into documents, with a few hundred rows of the needed columns in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import pyarrow
from pyarrow import ipc, types

from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError, Refused, Span, cut_units
from sheepop.data.extract.rows import SAMPLE_ROWS, Row, row_documents
from sheepop.data.extract.template import RecordFormat

_BATCH_ROWS = 256
_BATCH_BYTES = 2**22
_BUFFER_BYTES = 2**17
_ARROW_FILE = b"ARROW1"

# Returns the names of the columns read and the record batches, of all columns and row groups if these are None.
Opened = Callable[[BinaryIO, Sequence[str] | None, range | None], tuple[list[str], Iterator[pyarrow.RecordBatch]]]


def extract_parquet(content: Content, context: Context) -> Documents:
    """Yields the rows of a Parquet file through `row_documents`, in batches of about 4 MB for any row group size."""
    span = content.span
    yield from _documents(content, context, _opened_parquet, range(span.begin, span.end) if span else None)


def cut_parquet(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of row groups; see `Cutter`."""
    from pyarrow import parquet

    with content.open() as file, _damage_named():
        metadata = parquet.ParquetFile(file).metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    shares = [content.size * count // max(1, sum(rows)) for count in rows]
    for span in cut_units(shares, part_bytes, "row groups"):
        yield span._replace(before=sum(rows[: span.begin]))


def extract_arrow(content: Content, context: Context) -> Documents:
    """Yields the rows of an Arrow file, Arrow stream or Feather file, whose record batches must each fit in memory."""
    yield from _documents(content, context, _opened_arrow)


def _documents(content: Content, context: Context, opened: Opened, groups: range | None = None) -> Documents:
    form = RecordFormat.of(context.config)
    with content.open() as file, _damage_named():
        names, batches = opened(file, None, None)
        first = None if form.names else next(batches, None)
        rows = [] if first is None else list(_batch_rows(first.slice(0, SAMPLE_ROWS), 0))
    if not names:
        raise ExtractionError("empty", "it has no columns")
    chosen = form.for_table(names, [dict(zip(names, row[1], strict=True)) for row in rows if isinstance(row, tuple)])
    needed = names if chosen is None else chosen.needed(names)
    with content.open() as file:
        with _damage_named():
            _, batches = opened(file, needed if len(needed) < len(names) else None, groups)
        if content.span is None:
            yield from row_documents(context.config, needed, _rows(batches, 0))
            return
        sample = [
            row if isinstance(row, Refused) else (row[0], [row[1][names.index(name)] for name in needed])
            for row in rows
        ]
        every = _rows(batches, content.span.before)
        yield from row_documents(context.config, needed, every, sample=sample, is_whole=False)


def _rows(batches: Iterator[pyarrow.RecordBatch], begin: int) -> Iterator[Row | Refused]:
    while True:
        with _damage_named():
            batch = next(batches, None)
        if batch is None:
            return
        for offset in range(0, batch.num_rows, _BATCH_ROWS):
            yield from _batch_rows(batch.slice(offset, _BATCH_ROWS), begin + offset)
        begin += batch.num_rows


def _batch_rows(batch: pyarrow.RecordBatch, begin: int) -> Iterator[Row | Refused]:
    columns = [_as_strings(column) for column in batch.columns]
    with suppress(ValueError, OverflowError):
        yield from enumerate(zip(*[column.to_pylist() for column in columns], strict=True), begin + 1)
        return
    # Some value cannot be converted, such as text that is not UTF-8: the rows are converted one by one.
    for index in range(batch.num_rows):
        try:
            yield begin + index + 1, [column[index].as_py() for column in columns]
        except UnicodeDecodeError as error:
            yield Refused(f"row {begin + index + 1}", "undecodable", f"a text is not UTF-8 ({error.reason})")
        except (ValueError, OverflowError) as error:
            yield Refused(f"row {begin + index + 1}", "unsupported", f"a value cannot be read ({error})")


def _as_strings(column: pyarrow.Array) -> pyarrow.Array:
    """Returns the column with dates and times as text, also inside records and lists: Python's types are too narrow."""
    wanted = _without_times(column.type)
    if wanted == column.type:
        return column
    try:
        return column.cast(wanted)
    except pyarrow.ArrowException:
        return column


def _without_times(kind: pyarrow.DataType) -> pyarrow.DataType:
    if types.is_duration(kind):
        return pyarrow.int64()
    if types.is_temporal(kind) and not types.is_interval(kind):
        return pyarrow.string()
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(_without_times(field.type)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_without_times(kind.value_type)))
    return kind


def _opened_parquet(
    file: BinaryIO, columns: Sequence[str] | None, groups: range | None
) -> tuple[list[str], Iterator[pyarrow.RecordBatch]]:
    from pyarrow import parquet

    reader = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    # The sizes of single columns are not read: pyarrow ends the process if their metadata is damaged.
    described = map(reader.metadata.row_group, range(reader.metadata.num_row_groups))
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in described), default=1)
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // (row_bytes or 1)))
    batches = reader.iter_batches(batch_size=size, row_groups=groups, columns=columns, use_threads=False)
    return reader.schema_arrow.names, batches


def _opened_arrow(
    file: BinaryIO, columns: Sequence[str] | None, _: range | None
) -> tuple[list[str], Iterator[pyarrow.RecordBatch]]:
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    opened = ipc.open_file if is_file else ipc.open_stream
    reader = opened(file)
    if columns is not None:
        fields = [reader.schema.names.index(name) for name in columns]
        file.seek(0)
        reader = opened(file, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    names = reader.schema.names
    return names, (batch.from_arrays([_validated(column) for column in batch.columns], names) for batch in batches)


def _validated(column: pyarrow.Array) -> pyarrow.Array:
    """Returns the column after checking its offsets, which could point anywhere; as bytes if it is not UTF-8."""
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        plain = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}.get(column.type)
        if plain is None:
            raise
        column = column.view(plain)
        column.validate(full=True)
    return column


@contextmanager
def _damage_named() -> Iterator[None]:
    damage = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError)
    try:
        yield
    except MemoryError:
        raise
    except pyarrow.ArrowNotImplementedError as error:
        raise ExtractionError("unsupported", str(error)) from None
    except damage as error:
        raise ExtractionError("encrypted" if "crypt" in str(error).lower() else "damaged", str(error)) from None
