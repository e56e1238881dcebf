"""Turns the tables of SQLite and DuckDB database files into documents; the files are opened read-only."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError, Refused, Span
from sheepop.data.extract.rows import SAMPLE_ROWS, Row, row_documents
from sheepop.data.extract.template import longest_record

if TYPE_CHECKING:
    import duckdb

_SQLITE_MAGIC = b"SQLite format 3\0"
_ROW_NAMES = ("rowid", "_rowid_", "oid")
_LAST_ROW = 2**63 - 1
_DUCKDB_TABLES = (
    "SELECT schema_name, table_name FROM duckdb_tables() WHERE NOT internal ORDER BY schema_name, table_name"
)
_FIRST_ROWS, _MOST_ROWS, _BATCH_BYTES = 16, 1000, 2**22
_READ_ONLY = ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON")

Faults = Callable[[int], AbstractContextManager[None]]
Table = tuple[str, Sequence[str], Iterable[Row | Refused], Iterable[Row | Refused] | None]
"""The displayed name of a table, its columns, the rows to read, and if these are those of a span, its first rows."""


def extract_sqlite(content: Content, context: Context) -> Documents:
    """Yields the rows of every table of a SQLite database, in the order of table names and row numbers.

    A table with a text column gives a document for each row, at ``table T row N``; any other gives one Markdown
    document. Views are left out. Virtual tables are refused, and so are changes still in a log next to the file.
    """
    path, span = content.path(context.scratch), content.span
    # Only a program with write access can apply such a log to the database.
    for suffix in ("-wal", "-journal") if span is None or span.number == 0 else ():
        log = path.with_name(path.name + suffix)
        if log.is_file() and (size := log.stat().st_size):
            detail = f"{size:,} bytes are not yet in the database; close it in the program that writes it"
            yield Refused(f"the log {suffix}", "unsupported", detail)
    try:
        with closing(open_sqlite(path, longest_record(context.config), "&immutable=1")) as connection:
            yield from _documents(_sqlite_tables(connection, span), context)
    except (sqlite3.Error, UnicodeError) as error:
        if "not a database" in str(error) and content.head(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC:
            raise ExtractionError("encrypted", "it is not a SQLite database, or it is encrypted") from None
        raise ExtractionError("damaged", str(error)) from None


def cut_sqlite(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of the rows of each table by rowid; see `Cutter`. None if a table has no rowids or is virtual."""
    tables: list[tuple[str, str, int]] = []
    path = content.path(context.scratch)
    with closing(open_sqlite(path, longest_record(context.config), "&immutable=1")) as connection:
        for name, columns in _sqlite_listed(connection):
            key = None if isinstance(columns, Refused) else _row_name(connection, name, columns)
            if key is None:
                return
            tables.append((name, key, connection.execute(f"SELECT count(*) FROM {_quoted(name)}").fetchone()[0]))
        total = max(1, sum(rows for _, _, rows in tables))
        step, number = max(1, total * part_bytes // content.size), 0
        for name, key, rows in tables:
            ids = connection.execute(f"SELECT {key} FROM {_quoted(name)} ORDER BY {key}")
            first = [row_id for at, (row_id,) in enumerate(ids) if at % step == 0] or [-_LAST_ROW]
            for at, (begin, end) in enumerate(zip(first, [*first[1:], _LAST_ROW], strict=True)):
                size = content.size * min(step, rows - at * step) // total
                yield Span(number, begin, end, at * step, size, "rowids", name)
                number += 1


def extract_duckdb(content: Content, context: Context) -> Documents:
    """Yields the tables of a DuckDB database like `extract_sqlite`, with rows in the order of insertion."""
    with _opened_duckdb(content, context) as (connection, faults_named):
        yield from _documents(_duckdb_tables(connection, faults_named, content.span), context)


def cut_duckdb(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of the rows of each table by rowid; see `Cutter`."""
    with _opened_duckdb(content, context) as (connection, _):
        tables = []
        for schema, table in connection.execute(_DUCKDB_TABLES).fetchall():
            name = f"{_quoted(schema)}.{_quoted(table)}"
            last = connection.execute(f"SELECT coalesce(max(rowid), 0) FROM {name}").fetchall()[0][0]
            tables.append((name, last + 1))
        total, number = sum(rows for _, rows in tables), 0
        step = max(1, total * part_bytes // content.size)
        for name, rows in tables:
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                before = connection.execute(f"SELECT count(*) FROM {name} WHERE rowid < {begin}").fetchall()[0][0]
                yield Span(number, begin, end, before, content.size * (end - begin) // total, "rowids", name)
                number += 1


@contextmanager
def _opened_duckdb(content: Content, context: Context) -> Iterator[tuple[duckdb.DuckDBPyConnection, Faults]]:
    import duckdb

    path = content.path(context.scratch)
    # DuckDB cannot open a name that is not UTF-8, so it gets a link; it finds and reads the log next to the real file.
    link = context.scratch / "database.duckdb"
    link.unlink(missing_ok=True)
    link.symlink_to(path.absolute())

    @contextmanager
    def faults_named(row: int = 0) -> Iterator[None]:
        try:
            yield
        except duckdb.OutOfMemoryException as error:
            raise MemoryError(str(error)) from None
        except duckdb.Error as error:
            message = str(error).splitlines()[0]
            for name in (path.resolve(), link):
                message = message.replace(str(name), "the file")
            reason = "encrypted" if "encrypt" in message.lower() else "damaged"
            raise ExtractionError(reason, f"after row {row}: {message}" if row else message) from None

    try:
        with faults_named(), open_duckdb(link, context.config) as connection:
            yield connection, faults_named
    finally:
        link.unlink(missing_ok=True)


def _documents(tables: Iterable[Table | Refused], context: Context) -> Documents:
    """Yields the documents of all tables; raises ``missing`` if none can be read and some lack that column."""
    missing: list[Refused] = []
    has_found = False
    for table in tables:
        if isinstance(table, Refused):
            yield table
            continue
        name, columns, rows, sample = table
        place = f"table {name}"
        try:
            first = None if sample is None else list(islice(sample, SAMPLE_ROWS))
            yield from row_documents(context.config, columns, rows, place, sample=first, is_whole=sample is None)
            has_found = True
        except ExtractionError as error:
            refused = Refused(place, error.reason, error.detail)
            if error.reason == "missing":
                missing.append(refused)
            else:
                yield refused
    if missing and not has_found:
        raise ExtractionError("missing", missing[0].detail)
    yield from missing


def open_sqlite(path: Path, max_value_bytes: int, options: str = "") -> sqlite3.Connection:
    """Returns a read-only connection with bounded value sizes that trusts nothing in the schema."""
    connection = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro{options}", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max_value_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    # Bytes that are not UTF-8 become surrogates, so that only their row is refused and not the rest of the table.
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    for pragma in _READ_ONLY:
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _sqlite_tables(connection: sqlite3.Connection, span: Span | None) -> Iterator[Table | Refused]:
    for name, columns in _sqlite_listed(connection):
        if isinstance(columns, Refused):
            yield columns
        elif span is None or span.table == name:
            sample = None if span is None else _sqlite_rows(connection, name, columns, None)
            shown, names = _shown(name), [column[1] for column in columns]
            yield shown, names, _sqlite_rows(connection, name, columns, span), sample


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _sqlite_listed(connection: sqlite3.Connection) -> Iterator[tuple[str, Sequence[Any] | Refused]]:
    """Yields the name of each table and the descriptions of its columns, or why it cannot be read."""
    shadows = set()
    if sqlite3.sqlite_version_info >= (3, 37):
        shadows = {row[0] for row in connection.execute("SELECT name FROM pragma_table_list WHERE type = 'shadow'")}
    listed = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    for name, definition in listed:
        place = f"table {_shown(name)}"
        if name.startswith("sqlite_") or name in shadows:
            continue
        if (definition or "").upper().startswith("CREATE VIRTUAL"):
            yield name, Refused(place, "unsupported", "it is virtual: its rows are made by an extension")
            continue
        try:
            yield name, connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            yield name, Refused(place, "damaged", str(error))


def _sqlite_rows(
    connection: sqlite3.Connection, table: str, columns: Sequence[Any], span: Span | None
) -> Iterator[Row | Refused]:
    """Yields the rows by rowid, each read by itself; a table without rowids is read in primary key order."""
    selected = f"SELECT {', '.join(_quoted(column[1]) for column in columns)} FROM {_quoted(table)}"
    key = _row_name(connection, table, columns)
    before, last = span.before if span else 0, None
    number = before
    try:
        if key is None:
            keys = [_quoted(name) for _, name in sorted((column[5], column[1]) for column in columns if column[5])]
            for number, row in enumerate(connection.execute(f"{selected} ORDER BY {', '.join(keys) or 1}"), 1):
                yield number, row
            return
        within = f"WHERE {key} >= {span.begin} AND {key} < {span.end}" if span else ""
        ids = connection.execute(f"SELECT {key} FROM {_quoted(table)} {within} ORDER BY {key}")
        for number, (row_id,) in enumerate(ids, before + 1):
            # Damaged pages that point back at each other would repeat rows without end.
            if last is not None and row_id <= last:
                raise ExtractionError("damaged", f"after row {number - 1}, earlier rows are repeated")
            last = row_id
            try:
                found = connection.execute(f"{selected} WHERE {key} = ?", (row_id,)).fetchone()
            except sqlite3.DataError as error:
                yield Refused(f"row {number}", "oversized", str(error))
                continue
            if found is None:
                raise ExtractionError("damaged", f"row {number} is listed but missing")
            yield number, found
    except sqlite3.DataError as error:
        raise ExtractionError("oversized", f"after row {number}: {error}") from None
    except (sqlite3.Error, UnicodeError) as error:
        raise ExtractionError("damaged", f"after row {number}: {error}") from None


def _row_name(connection: sqlite3.Connection, table: str, columns: Sequence[Any]) -> str | None:
    """Returns the name of the rowid column, or None if the table has no rowids or its columns hide all names."""
    taken = {column[1].lower() for column in columns}
    for name in _ROW_NAMES:
        with suppress(sqlite3.Error):
            if name not in taken:
                connection.execute(f"SELECT {name} FROM {_quoted(table)} LIMIT 0")
                return name
    return None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def open_duckdb(path: Path, config: ExtractConfig) -> duckdb.DuckDBPyConnection:
    """Returns a read-only connection to this one file that uses half of the memory limit; raises `duckdb.Error`."""
    import duckdb

    denied = ("enable_external_access", "autoload_known_extensions", "autoinstall_known_extensions")
    settings: dict[str, Any] = dict.fromkeys(denied, False)
    settings |= {"threads": 1, "memory_limit": f"{config.max_memory_bytes // 2**21}MiB", "temp_directory": ""}
    connection = duckdb.connect(str(path), read_only=True, config=settings)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection


def _duckdb_tables(connection: duckdb.DuckDBPyConnection, faults_named: Faults, span: Span | None) -> Iterator[Table]:
    for schema, table in connection.execute(_DUCKDB_TABLES).fetchall():
        quoted = f"{_quoted(schema)}.{_quoted(table)}"
        if span is not None and span.table != quoted:
            continue
        columns = [row[:2] for row in connection.execute(f"DESCRIBE {quoted}").fetchall()]
        # Python's date types cannot hold every date of the database.
        shown = [
            f"CAST({_quoted(name)} AS VARCHAR)" if kind.startswith(("DATE", "TIME", "INTERVAL")) else _quoted(name)
            for name, kind in columns
        ]
        statement = f"SELECT {', '.join(shown)} FROM {quoted}"
        name = table if schema == "main" else f"{schema}.{table}"
        names, within = [name for name, _ in columns], ""
        sample: Iterable[Row] | None = None
        if span is not None:
            sample = list(_duckdb_rows(connection, f"{statement} LIMIT {SAMPLE_ROWS}", faults_named, 0))
            within = f" WHERE rowid >= {span.begin} AND rowid < {span.end} ORDER BY rowid"
        before = span.before if span else 0
        yield name, names, _duckdb_rows(connection, statement + within, faults_named, before), sample


def _duckdb_rows(
    connection: duckdb.DuckDBPyConnection, statement: str, faults_named: Faults, before: int
) -> Iterator[Row]:
    with faults_named(before):
        found = connection.execute(statement)
    yield from fetched_rows(found.fetchmany, faults_named, before)


def fetched_rows(fetch: Callable[[int], Sequence[Any]], faults_named: Faults, number: int = 0) -> Iterator[Row]:
    """Yields the rows of a cursor in batches, numbered after `number`.

    Each fetch runs in `faults_named(number of the last row)`.
    """
    size = _FIRST_ROWS
    while True:
        with faults_named(number):
            rows = fetch(size)
        if not rows:
            return
        for row in rows:
            number += 1
            yield number, row
        longest = max(sum(len(value) for value in row if isinstance(value, str | bytes)) for row in rows)
        size = max(1, min(_MOST_ROWS, 4 * size, _BATCH_BYTES // max(1, longest)))
