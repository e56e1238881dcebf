"""Writes blocks, tables and code as Markdown, and cleans metadata, in the same way for every format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

_BACKTICKS = re.compile(r"`+")
_DEEPEST_HEADING = 6
_DATE = re.compile(r"\s*(\d{4}(?:-\d\d){0,2})")
_LONGEST_FACT = 1000


def join(blocks: Iterable[tuple[str, str]]) -> str:
    """Joins blocks, given as (kind, text), with empty lines between them; an ``item`` follows an item without one.

    A ``line`` is a line of code; consecutive lines come between fences. A block of another kind without text ends such
    a run, and is left out.
    """
    parts: list[str] = []
    before = ""
    for kind, group in groupby(blocks, key=itemgetter(0)):
        texts = [text for _, text in group]
        if kind == "line":
            code = "\n".join(texts).strip("\n")
            texts = [fenced(code)] if code.strip() else []
        for text in filter(None, texts):
            if parts:
                parts.append("\n" if before == kind == "item" else "\n\n")
            parts.append(text)
            before = kind
    return "".join(parts)


def one_line(blocks: Iterable[tuple[str, str]]) -> str:
    """Joins the texts of blocks with spaces, for a table cell or a title."""
    return " ".join(text for _, text in blocks if text)


def heading(level: int, text: str) -> str:
    """Returns a heading of `level` 1 to 6 (deeper levels become 6), or an empty string without text."""
    text = " ".join(text.split())
    return f"{'#' * min(level, _DEEPEST_HEADING)} {text}" if text else ""


def item(level: int, label: str, text: str) -> str:
    """Returns a list item of `level`, from 0, with its further lines aligned below the first."""
    indent = "  " * level
    rest, lines = f"\n{indent}{' ' * len(label)} ", text.split("\n")
    return f"{indent}{label} {rest.join(lines)}"


def marked(pieces: Iterable[tuple[str, str]]) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Joins pieces, given as (name, text), and returns the text and a mark (offset, name) for each piece with text."""
    parts: list[str] = []
    marks: list[tuple[int, str]] = []
    length = 0
    for name, text in pieces:
        if text:
            marks.append((length, name))
            parts.append(text)
            length += len(text) + 2
    return "\n\n".join(parts), tuple(marks)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Returns a pipe table under its first row; escapes pipes, and drops empty rows and extra white space in cells."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    cells = [row for row in cells if any(row)]
    width = max((number for row in cells for number, cell in enumerate(row, 1) if cell), default=0)
    lines = [f"| {' | '.join([*row[:width], *[''] * (width - len(row))])} |" for row in cells]
    if lines:
        lines.insert(1, f"|{' --- |' * width}")
    return "\n".join(lines)


def fenced(code: str, language: str = "") -> str:
    """Returns the unchanged code between fences that are longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _BACKTICKS.findall(code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def code_span(code: str) -> str:
    """Returns inline code between a number of backticks that does not occur in it."""
    runs = {len(run) for run in _BACKTICKS.findall(code)}
    ticks = "`" * next(count for count in range(1, len(runs) + 2) if count not in runs)
    return f"{ticks} {code} {ticks}" if "`" in (code[0], code[-1]) else f"{ticks}{code}{ticks}"


def facts_of(stated: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the metadata that is present, each value on one line; values over 1000 characters are left out."""
    lines = {name: " ".join((value or "").split()) for name, value in stated.items()}
    return {name: line for name, line in lines.items() if 0 < len(line) <= _LONGEST_FACT}


def date_of(text: str | None) -> str:
    """Returns the date at the beginning of an ISO 8601 time, as year, month or day; empty if there is none."""
    match = _DATE.match(text or "")
    return match[1] if match else ""
