"""CSV and its relatives: text in rows and columns, to documents."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from sheepop.data.extract.dialect import Dialect, Shape, find_shape
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.lines import Lines
from sheepop.data.extract.rows import Row, RowDocuments
from sheepop.data.extract.template import TEXT_FIELDS, longest_record

_SAMPLE_LINES = 2000
_SAMPLE_CHARACTERS = 2**17
_LONGEST_NAME = 100
# A row whose quote is never closed is read up to the limit and then again line by line. So often may that be.
_MOST_RETURNS = 8
_NUMBER = re.compile(r"[\s+\-$€£%]*\d[\d\s.,:/\-+eE%]*")
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?")


def extract_csv(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The rows of a CSV or TSV file: one document for each where a column holds text, else the table as Markdown.

    Delimiter and quotes are found from the first lines, and so is whether there is a header; a file for which a
    column or a template is configured must have one; a file of one column without a header is lines of text. A row
    with another number of columns than most is kept, see `RowDocuments`; where a template or a pair needs to know
    which column is which, it is refused when it has too many. So is one that breaks the rules of quotes, and the next
    line begins a row.
    """
    # The standard limit is 128 KiB a cell; rows are bounded below.
    csv.field_size_limit(2**31 - 1)
    config = context.config
    lines = Lines(content, longest_record(config))
    shape, num_skipped = _shape(lines, content.suffix)
    source = _Source(iter(lines), longest_record(config))
    for _ in range(num_skipped):
        next(source)
    rows = _rows(source, shape.dialect)
    metadata = {} if lines.encoding == "utf_8" else {"encoding": lines.encoding}
    delimiter = shape.dialect.delimiter + (" " if shape.dialect.skips_space else "")
    documents = RowDocuments(config, metadata=metadata, delimiter=delimiter)
    first = None
    for row in rows:
        if not isinstance(row, Refused) and len(row) == shape.num_columns:
            first = row
            break
        yield row if isinstance(row, Refused) else _title(row, source.place, documents)
    if first is None:
        raise ExtractionError("empty", "it has no rows")
    if documents.format.names or _is_header(first):
        names = [name.strip() for name in first]
        yield from documents.of(names, _numbered(rows, len(names)))
    else:
        names = [f"column {number}" for number in range(1, len(first) + 1)] if len(first) > 1 else []
        yield from documents.of(names, _numbered(chain([first], rows), len(names)))


def _shape(lines: Lines, suffix: str) -> tuple[Shape, int]:
    """The shape that the first lines show, and how many lines to pass over because they only name the delimiter."""
    sample: list[str] = []
    size = 0
    for _, line in islice(lines, _SAMPLE_LINES):
        if isinstance(line, str):
            sample.append(line)
            size += len(line)
            if size >= _SAMPLE_CHARACTERS:
                break
    if sample and (named := _SEPARATOR_LINE.fullmatch(sample[0])):
        return find_shape(sample[1:], delimiter=named[1]), 1
    is_tabbed = suffix in (".tsv", ".tab") and any("\t" in line for line in sample)
    return find_shape(sample, delimiter="\t" if is_tabbed else None), 0


class _Source(Iterator[str]):
    """Lines for `csv.reader`, of which those of the current row can be handed out again."""

    def __init__(self, lines: Iterator[tuple[int, str | ExtractionError]], max_characters: int) -> None:
        self._lines, self._max = lines, max_characters
        self._row: list[tuple[int, str | ExtractionError]] = []
        self._again: list[tuple[int, str | ExtractionError]] = []
        self._size = self._returned = 0

    def begin(self) -> None:
        """Starts a row with the next line."""
        self._row.clear()
        self._size = 0

    def __next__(self) -> str:
        if self._size > self._max:
            raise csv.Error(f"a quote is not closed within {self._max:,} characters")
        item = self._again.pop() if self._again else next(self._lines)
        self._row.append(item)
        line = item[1]
        if isinstance(line, ExtractionError):
            raise line
        if "\0" in line:
            raise ExtractionError("binary", "it contains a NUL byte")
        self._size += len(line)
        return line

    @property
    def place(self) -> str:
        """The lines of the current row."""
        first, last = self._row[0][0], self._row[-1][0]
        return f"line {first}" if first == last else f"lines {first} to {last}"

    @property
    def num_lines(self) -> int:
        """The number of lines in the current row."""
        return len(self._row)

    def return_all_but_first(self) -> None:
        """Hands out the lines of the current row again, without the first."""
        self._returned += self._size
        if self._returned > _MOST_RETURNS * self._max:
            raise ExtractionError("invalid", f"too many quotes are never closed, the last in {self.place}")
        self._again.extend(reversed(self._row[1:]))
        del self._row[1:]


def _rows(source: _Source, dialect: Dialect) -> Iterator[list[str] | Refused]:
    """The cells of each row; a row that breaks the rules is refused with the lines that it stood in."""
    reader = csv.reader(source, **dialect.options())
    while True:
        source.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except ExtractionError as error:
            yield Refused(source.place, error.reason, error.detail)
            continue
        except csv.Error as error:
            if source.num_lines > 1:
                source.return_all_but_first()
            yield Refused(source.place, "invalid", str(error))
            reader = csv.reader(source, **dialect.options())
            continue
        if cells:
            yield cells


def _title(cells: list[str], place: str, documents: RowDocuments) -> Extracted | Refused:
    """What stands in a row of its own above the table, a text unless a certain column is asked for."""
    text = " ".join(filter(None, map(str.strip, cells)))
    if text and not documents.format.names:
        return Extracted(text, place=place, metadata=documents.metadata or {})
    return Refused(place, "invalid", "it stands above the table, whose rows have another number of columns")


def _numbered(rows: Iterable[list[str] | Refused], num_columns: int) -> Iterator[Row | Refused]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, Refused):
            yield Refused(f"row {number}", row.reason, f"{row.detail} ({row.place})")
            continue
        while len(row) > num_columns and not row[-1]:
            row.pop()
        yield number, row


def _is_header(cells: list[str]) -> bool:
    """Whether the first row names the columns: different short words that are no numbers; the first may be empty."""
    names = [cell.strip() for cell in cells]
    if len(names) == 1:
        return names[0].lower() in TEXT_FIELDS or names[0].isidentifier()
    is_short = all(len(name) <= _LONGEST_NAME and "\n" not in name for name in names)
    return is_short and len(set(names)) == len(names) and all(names[1:]) and not any(map(_NUMBER.fullmatch, names))
