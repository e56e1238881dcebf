"""Turns table rows into documents: one for each row if a column has text, else the whole table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Documents, Extracted, ExtractionError, Refused
from sheepop.data.extract.template import RecordFormat, cell_text, longest_record

SAMPLE_ROWS = 32
_SAMPLE_CHARACTERS = 2**22
_MARKS = str.maketrans({"|": "\\|", "\n": "<br>", "\r": "<br>"})

Row = tuple[int, Sequence[Any]]
"""The number of a row in its table, from 1, and a value for each column; `row_documents` allows other lengths."""


def is_table(config: ExtractConfig, columns: Sequence[str], rows: Iterable[Row | Refused], delimiter: str = "") -> bool:
    """Returns whether `row_documents` would make a Markdown table of these rows, because no column has text."""
    return _chosen(config, columns, islice(rows, SAMPLE_ROWS), delimiter) is None


def _chosen(
    config: ExtractConfig, columns: Sequence[str], sample: Iterable[Row | Refused], delimiter: str
) -> RecordFormat | None:
    records = [_record(columns, row[1], None, delimiter) for row in sample if not isinstance(row, Refused)]
    return RecordFormat.of(config).for_table(columns, records)


def row_documents(
    config: ExtractConfig,
    columns: Sequence[str],
    rows: Iterable[Row | Refused],
    place: str = "",
    delimiter: str = "",
    *,
    sample: Sequence[Row | Refused] | None = None,
    is_whole: bool = True,
) -> Documents:
    """Yields the documents and refusals of the rows of a table, in order, in the form that `config` selects.

    `place` is put before every place. With a `delimiter`, rows may have any length: missing cells at the end are empty,
    and surplus cells are part of the text. Without columns, each row is a line of text in one cell. The rows of a
    span are not the `is_whole` table, and `sample` has its first rows, which decide what its columns contain. Raises
    `ExtractionError` for a missing column, and any error of `rows` after the documents of the rows before it.
    """
    rows = iter(rows)
    head: list[Row | Refused] = []
    size, failure = 0, None
    # Enough rows to tell what the columns contain, fewer if they are long.
    try:
        while len(head) < SAMPLE_ROWS and size < _SAMPLE_CHARACTERS and (row := next(rows, None)) is not None:
            head.append(row)
            if not isinstance(row, Refused):
                size += sum(len(value) for value in row[1] if isinstance(value, str | bytes))
    except ExtractionError as error:
        failure = error

    def every() -> Iterator[Row | Refused]:
        yield from head
        if failure:
            raise failure
        yield from rows

    chosen = _chosen(config, columns, head if sample is None else sample, delimiter)
    if chosen is None:
        most = config.max_document_bytes
        yield from _table_documents(most, columns, every(), place, delimiter, is_whole=is_whole)
        return
    most, prefix = longest_record(config), f"{place} " if place else ""
    for row in every():
        if isinstance(row, Refused):
            yield replace(row, place=prefix + row.place)
        elif len(row[1]) > len(columns) and chosen.column not in columns:
            detail = f"it has {len(row[1])} columns where the table has {len(columns)}"
            yield Refused(f"{prefix}row {row[0]}", "invalid", detail)
        else:
            yield chosen.document(_record(columns, row[1], chosen.column, delimiter), f"{prefix}row {row[0]}", most)


def _record(columns: Sequence[str], values: Sequence[Any], text: str | None, delimiter: str) -> dict[str, Any]:
    """Returns the row as a record; surplus values are joined again with the value of the column `text`."""
    surplus = len(values) - len(columns)
    if surplus > 0 and text in columns:
        at = columns.index(text)
        values = [*values[:at], delimiter.join(values[at : at + surplus + 1]), *values[at + surplus + 1 :]]
    elif surplus < 0 and delimiter:
        values = [*values, *[""] * -surplus]
    return dict(zip(columns, values, strict=not delimiter))


def _table_documents(
    most: int, columns: Sequence[str], rows: Iterator[Row | Refused], place: str, delimiter: str, *, is_whole: bool
) -> Documents:
    """Yields the table, cut between rows into documents of at most `most` bytes that each begin with the header."""
    head = f"{_line(columns)}\n|{' --- |' * len(columns)}\n" if columns else ""
    most -= len(head.encode("utf-8"))
    lines, size, first, last = [head], 0, 0, 0
    is_empty, failure = True, None

    def table() -> Extracted:
        rows_within = "" if is_whole else f"rows {first} to {last}"
        return Extracted("".join(lines), "table" if columns else "prose", "", f"{place} {rows_within}".strip())

    try:
        for row in rows:
            is_empty = False
            made = row if isinstance(row, Refused) else _row_line(row, len(columns), delimiter, most)
            if isinstance(made, Refused):
                yield replace(made, place=f"{place} {made.place}".strip())
                continue
            number, line, length = made
            if first and size + length > most:
                is_whole = False
                yield table()
                lines, size, first = [head], 0, 0
            lines.append(line)
            size += length
            first, last = first or number, number
    except ExtractionError as error:
        failure, is_whole = error, False
    if first:
        yield table()
    if failure:
        raise failure
    if is_empty:
        yield Refused(place, "empty", "the table has no rows")


def _row_line(row: Row, width: int, delimiter: str, most: int) -> tuple[int, str, int] | Refused:
    """Returns the number of the row, its Markdown line of at least `width` columns (0: plain text), and its bytes."""
    number, values = row
    try:
        line = _line([*values, *[""] * (width - len(values))]) if width else delimiter.join(values)
        line += "\n"
        size = len(line) if line.isascii() else len(line.encode("utf-8"))
        if size > most:
            raise ExtractionError("oversized", f"{size:,} bytes, over the limit of data.extract.max_document_bytes")
    except ExtractionError as error:
        return Refused(f"row {number}", error.reason, error.detail)
    except UnicodeEncodeError as error:
        return Refused(f"row {number}", "undecodable", f"{error.object[error.start]!r} is half of a surrogate pair")
    return number, line, size


def _line(values: Sequence[Any]) -> str:
    try:
        line = f"| {' | '.join(values)} |"
    except TypeError:
        values = [cell_text(value) for value in values]
        line = f"| {' | '.join(values)} |"
    if line.count("|") == len(values) + 1 and "\n" not in line and "\r" not in line:
        return line
    # Escape what would end a cell or a row in Markdown.
    return "| " + " | ".join(value.replace("\r\n", "\n").translate(_MARKS) for value in values) + " |"
