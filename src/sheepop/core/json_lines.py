"""JSON lines: files with one JSON object on each line."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sheepop.core.errors import DataError


@dataclass(frozen=True)
class BadLine:
    """A line without a JSON object; `reason` says why, such as ``not a JSON object``."""

    reason: str


def parsed_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """The number of every line that is not blank, from 1, with its object or a `BadLine`."""
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        if not text:
            continue
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            yield number, BadLine(f"not valid JSON ({error})")
        else:
            yield number, value if isinstance(value, dict) else BadLine("not a JSON object")


def json_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line numbers and objects of a file; raises `DataError` with file and line for anything else."""
    try:
        with Path(path).open("rb") as file:
            for number, row in parsed_lines(file):
                if isinstance(row, BadLine):
                    raise DataError(
                        f"{path}, line {number}: {row.reason}. Write one JSON object on each line, in UTF-8."
                    )
                yield number, row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {(error.strerror or '').lower()}.") from None
