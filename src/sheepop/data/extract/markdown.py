"""Blocks, tables and code as Markdown, and what a file says of itself, the same way whatever file they come from."""

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
    """Blocks, given as kind and text, as one text: each ``item`` on the line after the one before, all else apart.

    A ``line`` is one of code; those that follow each other come between fences. Blocks without text end such a run,
    and are left out.
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
    """The texts of blocks in a row, as they stand in a cell or a title."""
    return " ".join(text for _, text in blocks if text)


def heading(level: int, text: str) -> str:
    """A heading of `level` 1 to 6, deeper ones as of 6; empty without text."""
    text = " ".join(text.split())
    return f"{'#' * min(level, _DEEPEST_HEADING)} {text}" if text else ""


def item(level: int, label: str, text: str) -> str:
    """An item of a list on `level`, from 0, whose further lines stand below the first."""
    indent = "  " * level
    rest, lines = f"\n{indent}{' ' * len(label)} ", text.split("\n")
    return f"{indent}{label} {rest.join(lines)}"


def marked(pieces: Iterable[tuple[str, str]]) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Pieces, given as name and text, as one text, with a mark of that name where each that is not empty begins."""
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
    """A pipe table whose first row is the header; rows are filled up to the longest, and empty rows left out.

    White space in a cell becomes one space, so that a row is one line; a pipe is escaped. Without any text the
    result is empty.
    """
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    cells = [row for row in cells if any(row)]
    width = max((number for row in cells for number, cell in enumerate(row, 1) if cell), default=0)
    lines = [f"| {' | '.join([*row[:width], *[''] * (width - len(row))])} |" for row in cells]
    if lines:
        lines.insert(1, f"|{' --- |' * width}")
    return "\n".join(lines)


def fenced(code: str, language: str = "") -> str:
    """Code between fences that are longer than any run of backticks in it; its lines stay exact."""
    fence = "`" * max(3, 1 + max((len(run) for run in _BACKTICKS.findall(code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def code_span(code: str) -> str:
    """Code within a line of prose, between backticks that it does not hold itself."""
    runs = {len(run) for run in _BACKTICKS.findall(code)}
    ticks = "`" * next(count for count in range(1, len(runs) + 2) if count not in runs)
    return f"{ticks} {code} {ticks}" if "`" in (code[0], code[-1]) else f"{ticks}{code}{ticks}"


def facts_of(stated: Mapping[str, str | None]) -> dict[str, str]:
    """The facts that are stated, each on one line; what is longer than 1000 characters is a text, and no fact."""
    lines = {name: " ".join((value or "").split()) for name, value in stated.items()}
    return {name: line for name, line in lines.items() if 0 < len(line) <= _LONGEST_FACT}


def date_of(text: str | None) -> str:
    """The year, month or day with which a time in ISO 8601 begins, empty where it is none."""
    match = _DATE.match(text or "")
    return match[1] if match else ""
