"""Reads the objects of JSON lines, JSON lists and Parquet files with their places."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from sheepop.core.errors import DataError, first_few
from sheepop.core.json_lines import parsed_lines
from sheepop.data.extract.interface import ExtractionError
from sheepop.data.extract.unpacking import decompressed

_PARQUET_ROWS = 1024


def record_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a file with their places, such as ``chats.jsonl, line 3``, a few in memory at a time.

    Files are JSON lines (``.jsonl``, ``.ndjson``, also with ``.gz`` or ``.zst``), a JSON list (``.json``), or Parquet.
    A line that is not JSON is a `BadLine`. Raises `DataError` if the file cannot be read.
    """
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet_rows(path)
        elif name.endswith(".json"):
            yield from _list_rows(path)
        elif name.removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson")):
            with path.open("rb") as file:
                lines = decompressed(file) if name.endswith((".gz", ".zst")) else file
                yield from _numbered(path, lines)
        else:
            raise DataError(f"{path}: examples are .jsonl, .json or .parquet files. Convert it, or rename it.")
    except (OSError, ExtractionError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def file_of(place: str) -> str:
    """The file in the place of an object."""
    return place.rpartition(", ")[0]


def _numbered(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}, line {number:,}", value) for number, value in parsed_lines(lines))


def _list_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON list, or the lines of a file that the hub names ``.json`` but holds one object a line."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        if content.partition(b"\n")[0].rstrip().endswith(b"}"):
            yield from _numbered(path, content.splitlines(keepends=True))
            return
        value = None
    if isinstance(value, dict):  # one example, such as a saved chat
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{path} is not a JSON list of objects. Give such a list, or JSON lines in a .jsonl file.")
    for number, entry in enumerate(value, 1):
        yield f"{path}, entry {number:,}", entry


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow. Install it with: pip install 'sheepop[data]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number:,}", _without_absent(row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file, or damaged: {first_few([str(error)], 1)}.") from None


def _without_absent(value: Any) -> Any:
    """`value` without null entries: Parquet gives every object all keys of its column, with null for absent ones."""
    if isinstance(value, dict):
        return {key: _without_absent(entry) for key, entry in value.items() if entry is not None}
    return [_without_absent(entry) for entry in value] if isinstance(value, list) else value
