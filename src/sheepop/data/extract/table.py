"""Detects the dialect of CSV and similar files, and turns their rows into documents."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused, Span
from sheepop.data.extract.rows import SAMPLE_ROWS, Row, is_table, row_documents
from sheepop.data.extract.template import TEXT_FIELDS, RecordFormat, longest_record
from sheepop.data.extract.text import Lines, ends_lines_with_lf

_SAMPLE_LINES = 2000
_SAMPLE_CHARACTERS = 2**17
_LONGEST_NAME = 100
# A row with an unclosed quote is read up to the limit and then again line by line, at most this many limits in a file.
_MOST_RETURNS = 8
_NUMBER = re.compile(r"[\s+\-$€£%]*\d[\d\s.,:/\-+eE%]*")
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?")
# Among dialects with equal scores, the delimiter that is rarer in text wins, and doubled quotes win.
_DELIMITERS = ("\t", ";", "|", ",")
Quoting = Literal["doubled", "escaped", "none"]
"""A quote inside quotes is ``doubled``, or ``escaped`` with a backslash; with ``none``, quotes have no meaning."""
Line = tuple[int, str | ExtractionError]
# A delimiter that never occurs gives one cell in each row, which is regular but weak evidence: its score is reduced.
_SINGLE_COLUMN = 0.7
_PARTS_NOTHING = "\x1f"
_OPEN_AT_END = 0.02


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a file separates and quotes cells; `skips_space` drops a space after the delimiter."""

    delimiter: str
    quoting: Quoting = "doubled"
    skips_space: bool = False

    def reader(self, lines: Iterator[str]) -> Any:
        """Returns a csv reader of `lines` that raises csv.Error for a misplaced quote."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quoting=csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL,
            doublequote=self.quoting == "doubled",
            escapechar="\\" if self.quoting == "escaped" else None,
            skipinitialspace=self.skips_space,
            strict=True,
        )


def extract_csv(content: Content, context: Context) -> Documents:
    """Yields one document for each row of a CSV or TSV file if a column has text, else the table as Markdown.

    Delimiter, quotes and header are detected from the first lines. A configured column or template requires a header; a
    file of one column without a header is lines of text. Rows of other lengths are kept as in `row_documents`, but with
    a template or pair a row that is too long is refused. A row with a misplaced quote is refused, and the next line
    begins a new row.
    """
    # The standard limit is 128 KiB a cell; rows are bounded below.
    config, span = context.config, content.span
    is_later = span is not None and span.number > 0
    lines = Lines(content.whole() if is_later else content, longest_record(config))
    table = _Table(lines, content.suffix, config)
    every, sample = table.numbered(), None
    if span is not None and is_later:
        sample = list(islice(every, SAMPLE_ROWS))
        lines = Lines(content, longest_record(config))
        every = table.numbered(_Rows(iter(lines), table.rows.dialect, longest_record(config)), span.before)
    rows = row_documents(config, table.names, every, delimiter=table.delimiter, sample=sample, is_whole=span is None)
    for item in rows if is_later else chain(table.above, rows):
        if lines.encoding != "utf_8" and isinstance(item, Extracted):
            item = replace(item, metadata={"encoding": lines.encoding})
        yield item


def cut_csv(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of whole rows; see `Cutter`. None for a table that is one document."""
    config = context.config

    def opened() -> _Table:
        return _Table(Lines(content, longest_record(config)), content.suffix, config)

    table, head = opened(), content.head(2**18)
    if not ends_lines_with_lf(head) or (
        content.size <= config.max_document_bytes and is_table(config, table.names, table.numbered(), table.delimiter)
    ):
        return
    table, begin = opened(), len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8)
    number = before = lines = passed = 0
    with content.section() as file:
        file.seek(begin)
        at = begin
        for row, _ in enumerate(table.numbered(), 1):
            if (last := table.rows.last_line) is None:
                continue
            at += sum(len(file.readline()) for _ in range(last - passed))
            passed = last
            if at - begin >= part_bytes:
                yield Span(number, begin, at, before, at - begin, lines=lines)
                number, begin, before, lines = number + 1, at, row, passed
    if begin < content.size:
        yield Span(number, begin, content.size, before, content.size - begin, lines=lines)


class _Table:
    """The rows of a file below its titles, and the names of their columns; detects the dialect from the first lines."""

    def __init__(self, lines: Lines, suffix: str, config: ExtractConfig) -> None:
        # The standard limit is 128 KiB a cell; rows are bounded below.
        csv.field_size_limit(2**31 - 1)
        sample = _sample(lines)
        named = _SEPARATOR_LINE.fullmatch(sample[0]) if sample else None
        if named:
            dialect, width = _shape(sample[1:], [named[1]])
        else:
            is_tabbed = suffix in (".tsv", ".tab") and any("\t" in line for line in sample)
            dialect, width = _shape(sample, ["\t"] if is_tabbed else _delimiters(sample))
        self.delimiter = dialect.delimiter + (" " if dialect.skips_space else "")
        self.rows = _Rows(islice(lines, 1 if named else 0, None), dialect, longest_record(config))
        self.above: list[Extracted | Refused] = []
        has_names = bool(RecordFormat.of(config).names)
        self._first = self._below_titles(width, has_names)
        self.names = [name.strip() for name in self._first]
        self._has_header = has_names or _is_header(self.names)
        if not self._has_header:
            self.names = [f"column {number}" for number in range(1, width + 1)] if width > 1 else []

    def _below_titles(self, width: int, has_names: bool) -> list[str]:
        """Returns the first row of `width` cells; the lines above it are titles."""
        for first in self.rows:
            if isinstance(first, Refused):
                self.above.append(first)
            elif len(first) == width:
                return first
            elif (title := " ".join(filter(None, map(str.strip, first)))) and not has_names:
                self.above.append(Extracted(title, place=self.rows.place))
            else:
                detail = "it is above the table, whose rows have a different number of columns"
                self.above.append(Refused(self.rows.place, "invalid", detail))
        raise ExtractionError("empty", "it has no rows")

    def numbered(self, rows: _Rows | None = None, before: int = 0) -> Iterator[Row | Refused]:
        """Yields the rows, or other `rows` after the first `before`, with their numbers."""
        every: Iterable[list[str] | Refused] = rows or self.rows
        if not self._has_header and rows is None:
            every = chain([self._first], every)
        return _numbered(every, len(self.names), before)


def _sample(lines: Lines) -> list[str]:
    sample: list[str] = []
    size = 0
    for line in (line for _, line in islice(lines, _SAMPLE_LINES) if isinstance(line, str)):
        sample.append(line)
        size += len(line)
        if size >= _SAMPLE_CHARACTERS:
            break
    return sample


def _shape(lines: list[str], delimiters: list[str]) -> tuple[Dialect, int]:
    """Returns the dialect in which most rows have one number of columns, and that number; one column needs none."""
    best: tuple[float, Dialect, int] = -1.0, Dialect(_PARTS_NOTHING), 1
    for dialect in _candidates("".join(lines), delimiters):
        widths, is_cut = _widths(lines, dialect)
        width, count = max(widths.items(), key=lambda item: (item[0] > 0, item[1], item[0]), default=(0, 0))
        share = count / max(1, widths.total()) * (1.0 if width > 1 else _SINGLE_COLUMN)
        share -= _OPEN_AT_END if is_cut else 0.0
        if width > 0 and share > best[0]:
            best = share, dialect, width
    _, dialect, width = best
    return (dialect, width) if width > 1 else (Dialect(_PARTS_NOTHING, dialect.quoting), 1)


def _delimiters(lines: list[str]) -> list[str]:
    """Returns the possible delimiters, and one that never occurs if the first line or the commas look like prose."""
    text = "".join(lines)
    present = [delimiter for delimiter in _DELIMITERS if delimiter in text]
    is_plain = not any(delimiter in lines[0] for delimiter in present) if lines else True
    return [*present, _PARTS_NOTHING] if is_plain or 2 * text.count(", ") > text.count(",") else present


def _candidates(text: str, delimiters: list[str]) -> Iterator[Dialect]:
    signs: dict[Quoting, str] = {"doubled": "", "escaped": '\\"', "none": '"'}
    for quoting in (quoting for quoting, sign in signs.items() if sign in text):
        for delimiter in delimiters:
            yield Dialect(delimiter, quoting)
            if quoting != "none" and f'{delimiter} "' in text:
                yield Dialect(delimiter, quoting, skips_space=True)


def _widths(lines: list[str], dialect: Dialect) -> tuple[Counter[int], bool]:
    """Returns the number of rows by number of cells (0: invalid rows), and whether a row is still open at the end.

    An open row of several lines may continue after the sample, or begin with a stray quote.
    """
    widths: Counter[int] = Counter()
    reader = dialect.reader(iter(lines))
    while True:
        begin = reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error:
            if reader.line_num >= len(lines):
                return widths, reader.line_num - begin > 1
            widths[0] += 1
            continue
        if cells is None:
            return widths, False
        if cells:
            widths[len(cells)] += 1


class _Rows:
    """Iterates over the cells of each row; an invalid row becomes a refusal with its lines."""

    def __init__(self, lines: Iterator[Line], dialect: Dialect, max_characters: int) -> None:
        self._lines, self.dialect, self._max = lines, dialect, max_characters
        # The lines of the current row, and the lines to read again.
        self._row: list[Line] = []
        self._again: list[Line] = []
        self._returned = 0

    def __iter__(self) -> Iterator[list[str] | Refused]:
        reader = self.dialect.reader(self._source())
        while True:
            self._row.clear()
            try:
                cells = next(reader, None)
            except (csv.Error, ExtractionError) as error:
                if isinstance(error, csv.Error):
                    self._return_all_but_first()
                    error = ExtractionError("invalid", str(error))
                yield Refused(self.place, error.reason, error.detail)
                reader = self.dialect.reader(self._source())
                continue
            if cells is None:
                return
            if cells:
                yield cells

    def _source(self) -> Iterator[str]:
        size = 0
        while item := self._again.pop() if self._again else next(self._lines, None):
            size = 0 if not self._row else size
            self._row.append(item)
            line = item[1]
            if isinstance(line, ExtractionError):
                raise line
            if "\0" in line:
                raise ExtractionError("binary", "it contains a NUL byte")
            size += len(line)
            yield line
            if self._row and size > self._max:
                raise csv.Error(f"a quote is not closed within {self._max:,} characters")

    @property
    def last_line(self) -> int | None:
        """The number of the last line that was read, or None if lines are to be read again."""
        return self._row[-1][0] if self._row and not self._again else None

    @property
    def place(self) -> str:
        """The line numbers of the current row, as text."""
        first, last = self._row[0][0], self._row[-1][0]
        return f"line {first}" if first == last else f"lines {first} to {last}"

    def _return_all_but_first(self) -> None:
        """Puts the lines of the current row back to be read again, without the first."""
        if len(self._row) > 1:
            self._returned += sum(len(line) for _, line in self._row if isinstance(line, str))
            if self._returned > _MOST_RETURNS * self._max:
                raise ExtractionError("invalid", f"too many quotes are never closed, the last in {self.place}")
            self._again.extend(reversed(self._row[1:]))
            del self._row[1:]


def _numbered(rows: Iterable[list[str] | Refused], num_columns: int, before: int) -> Iterator[Row | Refused]:
    for number, row in enumerate(rows, before + 1):
        if isinstance(row, Refused):
            yield Refused(f"row {number}", row.reason, f"{row.detail} ({row.place})")
            continue
        while len(row) > num_columns and not row[-1]:
            row.pop()
        yield number, row


def _is_header(names: list[str]) -> bool:
    """Returns whether the first row names the columns: distinct short texts, no numbers; the first may be empty."""
    if len(names) == 1:
        return names[0].lower() in TEXT_FIELDS or names[0].isidentifier()
    is_short = all(len(name) <= _LONGEST_NAME and "\n" not in name for name in names)
    return is_short and len(set(names)) == len(names) and all(names[1:]) and not any(map(_NUMBER.fullmatch, names))
