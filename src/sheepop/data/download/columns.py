"""Which column of a dataset is its text: the one asked for, or the one that can only be meant."""

from __future__ import annotations

import csv
import difflib
import io
import json
from pathlib import PurePosixPath

from sheepop.core.errors import DataError
from sheepop.data.download.excerpt import damaged_parquet, first_bytes, parquet_library
from sheepop.data.download.hub import Hub
from sheepop.data.download.selection import Selection, data_type

_BEGINNING = 2**15
# These give nothing before a whole block of theirs has come.
_BEGINNING_OF = {".zst": 2**18, ".bz2": 2**20}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def text_column(hub: Hub, selection: Selection, wanted: str | None) -> tuple[str | None, list[str]]:
    """The column that holds the text, and all columns, as the first file has them.

    The column is None for text without columns, and where it cannot be told which is meant. Raises `DataError` when
    there is no column of the name `wanted`.
    """
    path = selection.files[0].file.path
    found = _columns(hub, selection)
    if wanted is not None and found and wanted not in found:
        close = difflib.get_close_matches(wanted, found, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise DataError(f"{path} has no column {wanted!r}.{meant} It has: {', '.join(found)}.")
    if wanted is not None and data_type(path) == ".txt":
        raise DataError(f"{path} is plain text and has no column {wanted!r}. Leave it out.")
    texts = [name for name, is_text in found.items() if is_text]
    meant_only = "text" if "text" in texts else texts[0] if len(texts) == 1 else None
    return wanted or meant_only, list(found)


def _columns(hub: Hub, selection: Selection) -> dict[str, bool]:
    """Name of each column, and whether it holds strings; empty where there is none or its beginning does not tell."""
    file, kind = selection.files[0].file, data_type(selection.files[0].file.path)
    if kind == ".parquet":
        arrow, parquet = parquet_library()
        with damaged_parquet(file.path):
            schema = parquet.read_schema(hub.open(selection.contents, file, cache="none"))
        texts = (arrow.types.is_string, arrow.types.is_large_string)
        return {field.name: any(is_text(field.type) for is_text in texts) for field in schema}
    if kind in (".txt", ".arrow") or not file.size:
        return {}
    length = _BEGINNING_OF.get(PurePosixPath(file.path).suffix.lower(), _BEGINNING)
    beginning = first_bytes(hub, selection.contents, file, length).decode("utf-8", errors="replace")
    if kind in _DELIMITERS:
        try:
            names = next(csv.reader(io.StringIO(beginning), delimiter=_DELIMITERS[kind]), [])
        except csv.Error:
            names = []
        return dict.fromkeys(names, True)
    return _keys(beginning)


def _keys(beginning: str) -> dict[str, bool]:
    """The keys of the first record of JSON lines, or of an array of records."""
    text = beginning.lstrip("\ufeff \t\r\n[")
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    return {name: isinstance(value, str) for name, value in record.items()} if isinstance(record, dict) else {}
