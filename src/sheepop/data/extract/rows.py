"""Rows of any table to documents: one for each row where a column holds text, else the table itself, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted, ExtractionError, Kind, Refused
from sheepop.data.extract.template import RecordFormat, cell_text, longest_record

SAMPLE_ROWS = 32
_SAMPLE_CHARACTERS = 2**22
_MARKS = str.maketrans({"|": "\\|", "\n": "<br>", "\r": "<br>"})


Row = tuple[int, Sequence[Any]]
"""The number of a row in its table, counted from 1, and one value for each column; see `RowDocuments` for others."""


@dataclass(frozen=True, slots=True)
class RowDocuments:
    """Makes documents of rows as `config` asks.

    `place` goes in front of every place, and `metadata` to every document. Where a `delimiter` parts cells, rows may
    be of any length: what is missing at the end of a row is empty, and what is too much was part of its text.
    """

    config: ExtractConfig
    place: str = ""
    metadata: Mapping[str, str] | None = None
    delimiter: str = ""

    @property
    def format(self) -> RecordFormat:
        """How the configuration wants a record to become text."""
        return RecordFormat.of(self.config)

    def of(self, columns: Sequence[str], rows: Iterable[Row | Refused]) -> Iterator[Extracted | Refused]:
        """The documents that the rows make, in order; a refused row is handed on with the place in front.

        Without any columns, the rows are lines of text of one cell each.

        Raises `ExtractionError` when a column that was asked for is missing; what the rows raise, it raises after
        the documents of the rows before.
        """
        head, rows = _head(iter(rows))
        sample = [self._record(columns, row[1]) for row in head if not isinstance(row, Refused)]
        chosen = self.format.for_table(columns, sample)
        every = chain(head, rows)
        return self._tables(columns, every) if chosen is None else self._records(columns, every, chosen)

    def _records(
        self, columns: Sequence[str], rows: Iterable[Row | Refused], chosen: RecordFormat
    ) -> Iterator[Extracted | Refused]:
        most = longest_record(self.config)
        for row in rows:
            if isinstance(row, Refused):
                yield self._placed(row)
                continue
            place = self._at(f"row {row[0]}")
            if len(row[1]) > len(columns) and chosen.column not in columns:
                detail = f"it has {len(row[1])} columns where the table has {len(columns)}"
                yield Refused(place, "invalid", detail)
                continue
            document = chosen.document(self._record(columns, row[1], chosen.column), place, most)
            if self.metadata and isinstance(document, Extracted):
                document = replace(document, metadata=self.metadata)
            yield document

    def _record(self, columns: Sequence[str], values: Sequence[Any], text: str | None = None) -> dict[str, Any]:
        """The row as a record, in which surplus values go to the column `text`, as if nothing had parted them."""
        surplus = len(values) - len(columns)
        if surplus > 0 and text in columns:
            at = columns.index(text)
            values = [*values[:at], self.delimiter.join(values[at : at + surplus + 1]), *values[at + surplus + 1 :]]
        elif surplus < 0 and self.delimiter:
            values = [*values, *[""] * -surplus]
        return dict(zip(columns, values, strict=not self.delimiter))

    def _tables(self, columns: Sequence[str], rows: Iterable[Row | Refused]) -> Iterator[Extracted | Refused]:
        """The table, cut between rows into documents that each begin with the header."""
        head = f"{_line(columns)}\n|{' --- |' * len(columns)}\n" if columns else ""
        most = self.config.max_document_bytes - len(head.encode("utf-8"))
        lines, size, first, last = [head], 0, 0, 0
        is_whole, is_empty = True, True
        rows, failure = iter(rows), None
        while True:
            try:
                row = next(rows, None)
            except ExtractionError as error:
                row, failure = None, error
            if row is None:
                break
            is_empty = False
            if isinstance(row, Refused):
                yield self._placed(row)
                continue
            made = self._row_line(row, len(columns), most)
            if isinstance(made, Refused):
                yield made
                continue
            if size + made[1] > most and first:
                is_whole = False
                yield self._table(lines, f"rows {first} to {last}", columns)
                lines, size, first = [head], 0, 0
            lines.append(made[0])
            size += made[1]
            first, last = first or row[0], row[0]
        if first:
            yield self._table(lines, f"rows {first} to {last}" if failure or not is_whole else "", columns)
        if failure:
            raise failure
        if is_empty:
            yield Refused(self.place, "empty", "the table has no rows")

    def _row_line(self, row: Row, width: int, most: int) -> tuple[str, int] | Refused:
        """The row in Markdown of at least `width` columns, or of none as it is, and its length in bytes."""
        try:
            line = _line([*row[1], *[""] * (width - len(row[1]))]) if width else self.delimiter.join(row[1])
            line += "\n"
            size = len(line) if line.isascii() else len(line.encode("utf-8"))
        except ExtractionError as error:
            return Refused(self._at(f"row {row[0]}"), error.reason, error.detail)
        except UnicodeEncodeError as error:
            detail = f"{error.object[error.start]!r} is half of a surrogate pair"
            return Refused(self._at(f"row {row[0]}"), "undecodable", detail)
        if size > most:
            detail = f"{size:,} bytes, over what data.extract.max_document_bytes leaves"
            return Refused(self._at(f"row {row[0]}"), "oversized", detail)
        return line, size

    def _table(self, lines: list[str], place: str, columns: Sequence[str]) -> Extracted:
        kind: Kind = "table" if columns else "prose"
        return Extracted("".join(lines), kind, "", self._at(place), metadata=self.metadata or {})

    def _placed(self, refused: Refused) -> Refused:
        return replace(refused, place=self._at(refused.place)) if self.place else refused

    def _at(self, place: str) -> str:
        return f"{self.place} {place}".strip()


def _head(rows: Iterator[Row | Refused]) -> tuple[list[Row | Refused], Iterator[Row | Refused]]:
    """The first rows, enough to tell what the columns hold, fewer when they are long; and an iterator over the rest."""
    head: list[Row | Refused] = []
    size = 0
    try:
        for row in rows:
            head.append(row)
            if not isinstance(row, Refused):
                size += sum(len(value) for value in row[1] if isinstance(value, str | bytes))
            if len(head) >= SAMPLE_ROWS or size >= _SAMPLE_CHARACTERS:
                break
    except ExtractionError as error:
        # The rows before the damage are good.
        return head, _raising(error)
    return head, rows


def _raising(error: ExtractionError) -> Iterator[Row | Refused]:
    yield from ()
    raise error


def _line(values: Sequence[Any]) -> str:
    try:
        line = f"| {' | '.join(values)} |"
    except TypeError:
        values = [cell_text(value) for value in values]
        line = f"| {' | '.join(values)} |"
    if line.count("|") == len(values) + 1 and "\n" not in line and "\r" not in line:
        return line
    # What would end a cell or a row in Markdown is written as Markdown writes it.
    return "| " + " | ".join(value.replace("\r\n", "\n").translate(_MARKS) for value in values) + " |"
