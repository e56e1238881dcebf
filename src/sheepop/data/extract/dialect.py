"""How a CSV file is written: which character parts its cells, and how quotes are meant."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Quoting = Literal["doubled", "escaped", "none"]
_DELIMITERS = ("\t", ";", "|", ",")
_QUOTINGS: tuple[Quoting, ...] = ("doubled", "escaped", "none")
# A character that parts nothing gives one cell in every row, which is as regular as can be and says little.
_SINGLE_COLUMN = 0.7
_PARTS_NOTHING = "\x1f"
_OPEN_AT_END = 0.02


@dataclass(frozen=True, slots=True)
class Dialect:
    """The delimiter; whether a quote inside quotes is doubled, escaped with a backslash, or quotes mean nothing;
    and whether a space after the delimiter belongs to neither cell."""

    delimiter: str = ","
    quoting: Quoting = "doubled"
    skips_space: bool = False

    def options(self) -> dict[str, Any]:
        """The same for `csv.reader`, which then refuses a quote where none may stand."""
        return {
            "delimiter": self.delimiter,
            "quoting": csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL,
            "doublequote": self.quoting == "doubled",
            "escapechar": "\\" if self.quoting == "escaped" else None,
            "skipinitialspace": self.skips_space,
            "strict": True,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """What a sample of the file shows: its dialect and the number of columns of most rows."""

    dialect: Dialect
    num_columns: int


def find_shape(lines: list[str], *, delimiter: str | None = None) -> Shape:
    """The dialect under which most rows of the sample have the same number of columns.

    Among equals quotes doubled win over escaped and none, and a delimiter that is rarer in words over one that is
    common in them; `delimiter` leaves only that one. In a file of one column nothing parts cells, commas neither.
    """
    best: tuple[float, Shape] | None = None
    for dialect in _candidates(lines, [delimiter] if delimiter else _delimiters(lines)):
        widths, is_cut = _widths(lines, dialect)
        width, count = max(widths.items(), key=lambda item: (item[0] > 0, item[1], item[0]), default=(0, 0))
        share = count / max(1, widths.total()) * (1.0 if width > 1 else _SINGLE_COLUMN)
        share -= _OPEN_AT_END if is_cut else 0.0
        if width > 0 and (best is None or share > best[0]):
            best = share, Shape(dialect, width)
    if best is None or best[1].num_columns == 1:
        quoting = best[1].dialect.quoting if best is not None else "doubled"
        return Shape(Dialect(_PARTS_NOTHING, quoting), 1)
    return best[1]


def _delimiters(lines: list[str]) -> list[str]:
    """The characters that may part cells, and where the first line or the commas are those of sentences, none."""
    text = "".join(lines)
    present = [delimiter for delimiter in _DELIMITERS if delimiter in text]
    is_plain = not any(delimiter in lines[0] for delimiter in present) if lines else True
    return [*present, _PARTS_NOTHING] if is_plain or 2 * text.count(", ") > text.count(",") else present


def _candidates(lines: list[str], delimiters: Sequence[str]) -> Iterator[Dialect]:
    text = "".join(lines)
    has_quotes, has_escapes = '"' in text, '\\"' in text
    for quoting in _QUOTINGS:
        if (quoting == "none" and not has_quotes) or (quoting == "escaped" and not has_escapes):
            continue
        for delimiter in delimiters:
            yield Dialect(delimiter, quoting)
            if quoting != "none" and f'{delimiter} "' in text:
                yield Dialect(delimiter, quoting, skips_space=True)


def _widths(lines: list[str], dialect: Dialect) -> tuple[Counter[int], bool]:
    """How many rows have how many cells, 0 for those that break the rules, and whether the last is left open.

    A row of several lines that is still open at the end may go on after the sample, or be a stray quote.
    """
    widths: Counter[int] = Counter()
    reader = csv.reader(iter(lines), **dialect.options())
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
