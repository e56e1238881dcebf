"""Turns spreadsheets (xlsx, xlsb, xls, ods) into Markdown tables, one document for each sheet.

Cells have values, not formulas. Empty columns and rows are left out, whatever size the sheet claims.
"""

from __future__ import annotations

import datetime
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from sheepop.data.extract.archive import office_package, safe_zip
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import table
from sheepop.data.extract.office_parts import unescaped
from sheepop.data.extract.opendocument import refuse_encryption

_BLOCK = 2**20
# A formula without a stored value: the program that wrote the file did not compute it.
_WITHOUT_VALUE = re.compile(
    rb"(?:</(?:\w+:)?f>|<(?:\w+:)?f\b[^<>]*/>)\s*(?:<(?:\w+:)?v\s*/>|<(?:\w+:)?v>\s*</(?:\w+:)?v>)?\s*</(?:\w+:)?c>"
)
_LONGEST_END = 2**10
_ZIP = b"PK\x03\x04"
_RELATIONSHIPS, _STRICT = "_rels/.rels", b"http://purl.oclc.org/ooxml/"
_SHEET = re.compile(r"xl/worksheets/[^/]+\.xml", re.IGNORECASE)

_BIFF_HEAD, _BIFF_BYTES, _FILE_PASS = struct.Struct("<HH"), 4096, 0x2F
# The separator between two cells.
_CELL_BYTES = 3

# The name of a sheet, whether it is hidden, and its rows.
_Sheet = tuple[str, bool, Iterable[Iterable[Any]]]


def extract_xlsx(content: Content, context: Context) -> Documents:
    """Yields one table for each sheet that is not empty, also hidden ones, or several with the header for a long sheet.

    Places and marks are ``sheet NAME``. Metadata: ``hidden`` is ``yes`` for a hidden sheet; ``formulas_without_value``
    is the number of formulas in the workbook without a stored value, whose cells are empty. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive, content.open() as file:
        uncomputed = sum(_count(archive, name) for name in archive.namelist() if _SHEET.fullmatch(name))
        facts = {"formulas_without_value": str(uncomputed)} if uncomputed else {}
        # openpyxl reads row by row and keeps error values, but cannot read the strict form.
        is_strict = _RELATIONSHIPS in archive.namelist() and _STRICT in archive.read(_RELATIONSHIPS)
        yield from _documents(_by_calamine(file) if is_strict else _by_openpyxl(file), facts, context)


def extract_sheets(content: Content, context: Context) -> Documents:
    """Does the same for xlsb, xls and ods without ``formulas_without_value``; cells with an error value are empty."""
    with content.open() as file:
        if content.head(len(_ZIP)) == _ZIP:
            with safe_zip(content, context) as archive:
                refuse_encryption(archive)
        elif _is_locked(file):
            raise ExtractionError("encrypted", "it needs a password")
        file.seek(0)
        yield from _documents(_by_calamine(file), {}, context)


def _is_locked(file: BinaryIO) -> bool:
    """Returns whether one of the first records of an old workbook is FilePass ([MS-XLS] 2.4.117)."""
    from olefile import OleFileIO

    begin, at = b"", 0
    # Whatever a malformed container makes olefile raise, the reader of the workbook says what is damaged.
    with suppress(Exception):
        opened = OleFileIO(file)
        begin = opened.openstream("Workbook" if opened.exists("Workbook") else "Book").read(_BIFF_BYTES)
    while len(begin) - at >= _BIFF_HEAD.size:
        kind, size = _BIFF_HEAD.unpack_from(begin, at)
        if kind == _FILE_PASS:
            return True
        at += _BIFF_HEAD.size + size
    return False


def _documents(sheets: Iterable[_Sheet | Refused], facts: dict[str, str], context: Context) -> Documents:
    is_empty = True
    for sheet in sheets:
        if isinstance(sheet, Refused):
            yield sheet
            is_empty = False
            continue
        name, is_hidden, values = sheet
        texts = (
            {at: text for at, value in enumerate(row) if value is not None and (text := _text(value))} for row in values
        )
        rows = filter(None, texts)
        name = " ".join(name.split())
        metadata = {**facts, "hidden": "yes"} if is_hidden else facts
        for number, body in enumerate(_tables(rows, context.config.max_document_bytes), 1):
            place = f"sheet {name}" if number == 1 else f"sheet {name}, part {number}"
            marks = ((0, f"sheet {name}"),)
            yield Extracted(f"# {name}\n\n{body}", kind="table", place=place, marks=marks, metadata=metadata)
            is_empty = False
    if is_empty:
        raise ExtractionError("empty", "all of its sheets are empty")


def _by_openpyxl(file: BinaryIO) -> Iterator[_Sheet]:
    from openpyxl import load_workbook

    with warnings.catch_warnings():
        # openpyxl warns of features that it would lose when saving the file.
        warnings.simplefilter("ignore")
        for sheet in load_workbook(file, read_only=True, data_only=True, keep_links=False).worksheets:
            # openpyxl would fill the claimed dimensions of a sheet with empty cells.
            sheet.reset_dimensions()
            yield sheet.title, sheet.sheet_state != "visible", sheet.iter_rows(values_only=True)


def _by_calamine(file: BinaryIO) -> Iterator[_Sheet | Refused]:
    from python_calamine import CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum

    with _refusals():
        workbook = CalamineWorkbook.from_filelike(file)
    for sheet in workbook.sheets_metadata:
        if sheet.typ == SheetTypeEnum.WorkSheet:
            try:
                with _refusals():
                    rows = workbook.get_sheet_by_name(sheet.name).iter_rows()
            except ExtractionError as error:
                yield Refused(f"sheet {sheet.name}", error.reason, error.detail)
            else:
                yield sheet.name, sheet.visible != SheetVisibleEnum.Visible, rows


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns the errors of calamine for unreadable workbooks into `ExtractionError`."""
    from python_calamine import CalamineError, PasswordError

    try:
        yield
    except PasswordError:
        raise ExtractionError("encrypted", "it needs a password") from None
    except (CalamineError, OSError) as error:
        raise ExtractionError("damaged", f"it cannot be read as a workbook: {error}") from None
    except BaseException as error:
        # A panic in calamine becomes a BaseException of pyo3, not an Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ExtractionError("damaged", "it cannot be read as a workbook") from None


def _tables(rows: Iterable[dict[int, str]], limit: int) -> Iterator[str]:
    """Yields tables of at most about half of `limit` bytes, each with the first row as its header."""
    pending: list[dict[int, str]] = []
    columns: set[int] = set()
    size = 0
    for row in rows:
        text_bytes = sum(len(text.encode("utf-8", "replace")) + text.count("|") for text in row.values())
        # Each row has separators for all columns of the table.
        if size + text_bytes + _CELL_BYTES * (len(pending) + 1) * len(columns | row.keys()) > limit // 2 and size:
            yield _table(pending)
            pending, size = pending[:1], 0
            columns = set(pending[0])
        pending.append(row)
        columns |= row.keys()
        size += text_bytes
    if size:
        yield _table(pending)


def _table(rows: list[dict[int, str]]) -> str:
    columns = sorted({column for row in rows for column in row})
    return table([row.get(column, "") for column in columns] for row in rows)


def _text(value: Any) -> str:
    """Returns a value as text: dates in ISO 8601, numbers with up to 15 digits, like spreadsheets."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.15g}"
    if isinstance(value, datetime.datetime):
        return value.date().isoformat() if value.time() == datetime.time() else value.isoformat(sep=" ")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return " ".join(unescaped(str(value)).split())


def _count(archive: zipfile.ZipFile, name: str) -> int:
    """Returns the number of formulas in a sheet without a stored value."""
    found, before = 0, b""
    with archive.open(name) as part:
        while block := part.read(_BLOCK):
            text = before + block
            end = 0
            for match in _WITHOUT_VALUE.finditer(text):
                found, end = found + 1, match.end()
            before = text[max(end, len(text) - _LONGEST_END) :]
    return found
