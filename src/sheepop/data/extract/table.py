"""CSV and its relatives: how a file is written, and its rows to documents."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.lines import Lines
from sheepop.data.extract.rows import Row, row_documents
from sheepop.data.extract.template import TEXT_FIELDS, RecordFormat, longest_record

_SAMPLE_LINES = 2000
_SAMPLE_CHARACTERS = 2**17
_LONGEST_NAME = 100
# A row whose quote is never closed is read up to the limit and then again line by line. So often may that be.
_MOST_RETURNS = 8
_NUMBER = re.compile(r"[\s+\-$€£%]*\d[\d\s.,:/\-+eE%]*")
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?")
# Among equals a delimiter that is rarer in words wins, and quotes that are doubled.
_DELIMITERS = ("\t", ";", "|", ",")
Quoting = Literal["doubled", "escaped", "none"]
Line = tuple[int, str | ExtractionError]
# A character that parts nothing gives one cell in every row, which is as regular as can be and says little.
_SINGLE_COLUMN = 0.7
_PARTS_NOTHING = "\x1f"
_OPEN_AT_END = 0.02


@dataclass(frozen=True, slots=True)
class Dialect:
    """The delimiter; whether a quote inside quotes is doubled, escaped with a backslash, or quotes mean nothing;
    and whether a space after the delimiter belongs to neither cell."""

    delimiter: str
    quoting: Quoting = "doubled"
    skips_space: bool = False

    def reader(self, lines: Iterator[str]) -> Any:
        """The reader of such `lines`, which refuses a quote where none may stand."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quoting=csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL,
            doublequote=self.quoting == "doubled",
            escapechar="\\" if self.quoting == "escaped" else None,
            skipinitialspace=self.skips_space,
            strict=True,
        )


def extract_csv(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The rows of a CSV or TSV file: one document for each where a column holds text, else the table as Markdown.

    Delimiter, quotes and header are found from the first lines. With a column or a template configured there must be a
    header; a file of one column without one is lines of text. A row of another length is kept, see `row_documents`,
    unless a template or a pair needs to know which column is which and it is too long. One that breaks the rules of
    quotes is refused, and the next line begins a row.
    """
    # The standard limit is 128 KiB a cell; rows are bounded below.
    csv.field_size_limit(2**31 - 1)
    config = context.config
    lines = Lines(content, longest_record(config))
    sample = _sample(lines)
    named = _SEPARATOR_LINE.fullmatch(sample[0]) if sample else None
    if named:
        dialect, width = _shape(sample[1:], [named[1]])
    else:
        is_tabbed = content.suffix in (".tsv", ".tab") and any("\t" in line for line in sample)
        dialect, width = _shape(sample, ["\t"] if is_tabbed else _delimiters(sample))
    rows = _Rows(islice(lines, 1 if named else 0, None), dialect, longest_record(config))
    metadata = {} if lines.encoding == "utf_8" else {"encoding": lines.encoding}
    for item in _documents(rows, width, context):
        yield replace(item, metadata=metadata) if metadata and isinstance(item, Extracted) else item


def _documents(rows: _Rows, width: int, context: Context) -> Iterator[Extracted | Refused]:
    """What stands above the first row with as many cells as most, and the documents of the rows from there on."""
    has_names = bool(RecordFormat.of(context.config).names)
    for first in rows:
        if isinstance(first, Refused):
            yield first
        elif len(first) == width:
            break
        elif (title := " ".join(filter(None, map(str.strip, first)))) and not has_names:
            yield Extracted(title, place=rows.place)
        else:
            detail = "it stands above the table, whose rows have another number of columns"
            yield Refused(rows.place, "invalid", detail)
    else:
        raise ExtractionError("empty", "it has no rows")
    names = [name.strip() for name in first]
    every: Iterable[list[str] | Refused] = rows
    if not has_names and not _is_header(names):
        every = chain([first], rows)
        names = [f"column {number}" for number in range(1, width + 1)] if width > 1 else []
    delimiter = rows.dialect.delimiter + (" " if rows.dialect.skips_space else "")
    yield from row_documents(context.config, names, _numbered(every, len(names)), delimiter=delimiter)


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
    """The dialect under which most rows of the sample have the same number of columns, and that number.

    In a file of one column nothing parts cells, commas neither.
    """
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
    """The characters that may part cells, and where the first line or the commas are those of sentences, none."""
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
    """How many rows have how many cells, 0 for those that break the rules, and whether the last is left open.

    A row of several lines that is still open at the end may go on after the sample, or be a stray quote.
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
    """The cells of each row; a row that breaks the rules is refused with the lines that it stood in."""

    def __init__(self, lines: Iterator[Line], dialect: Dialect, max_characters: int) -> None:
        self._lines, self.dialect, self._max = lines, dialect, max_characters
        # The lines of the current row, and those that will come again.
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
    def place(self) -> str:
        """The lines of the current row."""
        first, last = self._row[0][0], self._row[-1][0]
        return f"line {first}" if first == last else f"lines {first} to {last}"

    def _return_all_but_first(self) -> None:
        """Has the lines of the current row come again, without the first."""
        if len(self._row) > 1:
            self._returned += sum(len(line) for _, line in self._row if isinstance(line, str))
            if self._returned > _MOST_RETURNS * self._max:
                raise ExtractionError("invalid", f"too many quotes are never closed, the last in {self.place}")
            self._again.extend(reversed(self._row[1:]))
            del self._row[1:]


def _numbered(rows: Iterable[list[str] | Refused], num_columns: int) -> Iterator[Row | Refused]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, Refused):
            yield Refused(f"row {number}", row.reason, f"{row.detail} ({row.place})")
            continue
        while len(row) > num_columns and not row[-1]:
            row.pop()
        yield number, row


def _is_header(names: list[str]) -> bool:
    """Whether the first row names the columns: different short words that are no numbers; the first may be empty."""
    if len(names) == 1:
        return names[0].lower() in TEXT_FIELDS or names[0].isidentifier()
    is_short = all(len(name) <= _LONGEST_NAME and "\n" not in name for name in names)
    return is_short and len(set(names)) == len(names) and all(names[1:]) and not any(map(_NUMBER.fullmatch, names))
