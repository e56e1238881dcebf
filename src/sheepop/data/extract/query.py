"""The rows of a query on any database that SQLAlchemy reaches: read-only, streamed, and rolled back at the end.

That nothing is written is seen to twice: the statement may only read, and the database is told so where it can be:
PostgreSQL, MySQL, MariaDB, Oracle, SQLite and DuckDB. What functions do that the query calls, no transaction undoes.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sheepop.data.extract.address import connect_arguments, parse_address, without_secrets
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.cutting import pieces_of
from sheepop.data.extract.database import limit_sqlite, open_duckdb
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.extract.rows import Row, row_documents
from sheepop.data.extract.statement import StatementError, require_reading
from sheepop.data.extract.template import longest_record

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

_NOT_OPENED, _FAILED = "the database cannot be opened", "the query failed"
_NO_LOG = logging.NullHandler()
_FIRST_ROWS, _MOST_ROWS, _BATCH_BYTES = 16, 1000, 2**22
# What a session is told before the query; times are given in UTC, whatever the server's zone is.
_SESSIONS = {
    "postgresql": ("SET TIME ZONE 'UTC'",),
    "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION time_zone = '+00:00'"),
    "mariadb": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION time_zone = '+00:00'"),
    "oracle": ("SET TRANSACTION READ ONLY",),
}
# SQLAlchemy takes a colon and a word for a parameter, and a backslash in front of them away.
_PARAMETER = re.compile(r"(?<![:\w\\]):(?=[\w$]+(?![:\w$]))")
_ESCAPED_PARAMETER = re.compile(r"\\(?=:[\w$]*(?![:\w$]))")


def read_query(url: str, query: str, config: ExtractConfig) -> Iterator[Extracted | Refused]:
    """The rows that `query` gives on the database at `url`, as `row_documents` makes them, with the place ``row N``.

    Rows are fetched from a cursor of the server in batches of about 4 MB. Raises `ExtractionError`: ``invalid`` for
    an address or query that is refused here, ``missing`` for a file or column, ``not_installed`` for a driver, and
    ``unreadable`` with the words of the database where it refuses the query or goes away, after the documents of the
    rows before.
    """
    address = parse_address(url)
    backend = address.get_backend_name()
    try:
        require_reading(query, backend)
    except StatementError as error:
        raise ExtractionError("invalid", f"the query is refused: {error}") from None
    open_result = _duckdb_result if backend == "duckdb" else _sqlalchemy_result
    with open_result(address, query, config) as (columns, rows):
        for item in row_documents(config, columns, rows):
            yield from pieces_of(item, config.max_document_bytes) if isinstance(item, Extracted) else (item,)


@contextmanager
def _sqlalchemy_result(address: URL, query: str, config: ExtractConfig) -> Iterator[tuple[list[str], Iterator[Row]]]:
    from sqlalchemy import text

    with _faults_named(address, _NOT_OPENED):
        engine = _engine(address, config)
        connection = engine.connect()
    try:
        with _faults_named(address, _NOT_OPENED):
            if address.get_backend_name() == "postgresql":
                connection = connection.execution_options(postgresql_readonly=True)
            for statement in _SESSIONS.get(address.get_backend_name(), ()):
                connection.exec_driver_sql(statement)
        with _faults_named(address, _FAILED):
            result = connection.execute(text(without_parameters(query)), execution_options={"stream_results": True})
            columns = list(result.keys())
        yield columns, _numbered(result.fetchmany, address)
    finally:
        _leave(connection, engine)


def _engine(address: URL, config: ExtractConfig) -> Engine:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    # What fails while a broken connection is left is of no interest; without a handler it would go to stderr.
    logging.getLogger("sqlalchemy").addHandler(_NO_LOG)
    settings: dict[str, Any] = {"poolclass": NullPool, "pool_reset_on_return": None, "hide_parameters": True}
    if address.get_backend_name() == "sqlite":
        path, limit = _database_file(address), longest_record(config)
        return create_engine("sqlite://", creator=lambda: _open_sqlite(path, limit), **settings)
    address, arguments = connect_arguments(address, config.max_seconds)
    return create_engine(address, connect_args=arguments, **settings)


def _open_sqlite(path: Path, max_value_bytes: int) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro", uri=True)
    limit_sqlite(connection, max_value_bytes)
    return connection


def _leave(connection: Connection, engine: Engine) -> None:
    """Rolls back and closes; a server that is gone has done so itself."""
    from sqlalchemy.exc import SQLAlchemyError

    for step in (connection.rollback, connection.close, engine.dispose):
        try:
            step()
        except (SQLAlchemyError, OSError, struct.error) as error:
            _let_go(error)
            connection.invalidate()


@contextmanager
def _duckdb_result(address: URL, query: str, config: ExtractConfig) -> Iterator[tuple[list[str], Iterator[Row]]]:
    try:
        import duckdb  # noqa: F401
    except ImportError as error:
        raise ExtractionError(
            "not_installed", f"the query needs duckdb: pip install 'sheepop[data]' ({error})"
        ) from None
    with _faults_named(address, _NOT_OPENED):
        connection = open_duckdb(_database_file(address), config.max_memory_bytes // 2)
    with closing(connection):
        with _faults_named(address, _FAILED):
            result = connection.execute(query)
            columns = [column[0] for column in result.description]
        yield columns, _numbered(result.fetchmany, address)


def _database_file(address: URL) -> Path:
    name = address.database
    if not name or name == ":memory:" or name.startswith("file:") or address.query:
        kind = address.get_backend_name()
        raise ExtractionError("invalid", f"give the path of the file alone: {kind}:///path/to/file.db")
    path = Path(name)
    if not path.is_file():
        raise ExtractionError("missing", f"there is no database file {name}")
    return path


def _numbered(fetch: Callable[[int], Sequence[Any]], address: URL) -> Iterator[Row]:
    """The rows, fetched in batches that are as large as their length allows."""
    number, size = 0, _FIRST_ROWS
    while True:
        with _faults_named(address, f"after row {number}" if number else _FAILED):
            rows = fetch(size)
        if not rows:
            return
        for row in rows:
            number += 1
            yield number, tuple(row)
        longest = max(sum(len(value) for value in row if isinstance(value, str | bytes)) for row in rows)
        size = max(1, min(_MOST_ROWS, 4 * size, _BATCH_BYTES // max(1, longest)))


def without_parameters(query: str) -> str:
    """The query as `sqlalchemy.text` needs it, so that the database gets it as it is, colons and all."""
    return _PARAMETER.sub(r"\\:", _ESCAPED_PARAMETER.sub(r"\\\\", query))


@contextmanager
def _faults_named(address: URL, where: str) -> Iterator[None]:
    """Turns what a driver raises into `ExtractionError`; `where` says what was being done."""
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    drivers: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, ValueError, TypeError, LookupError, struct.error)
    if address.get_backend_name() == "duckdb":
        import duckdb

        drivers = (*drivers, duckdb.Error)
    try:
        yield
    except ImportError as error:
        name = error.name or address.get_driver_name()
        raise ExtractionError("not_installed", f"the driver {name} is not installed: pip install {name}") from None
    except NoSuchModuleError:
        kind = address.drivername
        raise ExtractionError(
            "not_installed", f"{kind} is not a known kind of database; is its package installed?"
        ) from None
    except drivers as error:
        _let_go(error)
        raise ExtractionError("unreadable", f"{where}: {without_secrets(_message(error), address)}") from None


def _let_go(error: BaseException | None) -> None:
    """Empties the frames that an exception keeps: a socket in them would stay open until it is collected."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _message(error: Exception) -> str:
    """What the database itself says, on one line."""
    origin = getattr(error, "orig", None) or error
    first = origin.args[0] if origin.args else ""
    # pg8000 hands on the fields of the server's message.
    message = first.get("M", "") if isinstance(first, dict) else str(origin)
    return " ".join(message.split())[:300] or type(origin).__name__
