"""Streams the rows of a query on any database that SQLAlchemy supports, read-only, and rolls back at the end.

Two checks prevent writing: the statement may only read, and the session is read-only on PostgreSQL, MySQL, MariaDB,
Oracle, SQLite and DuckDB. The rollback does not undo side effects of functions that the query calls.
"""

from __future__ import annotations

import logging
import re
import ssl
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.database import fetched_rows, open_duckdb, open_sqlite
from sheepop.data.extract.interface import Documents, Extracted, ExtractionError
from sheepop.data.extract.rows import row_documents
from sheepop.data.extract.template import longest_record
from sheepop.data.extract.text import pieces_of

if TYPE_CHECKING:
    from sqlalchemy import URL

_FILE_DATABASES = frozenset({"sqlite", "duckdb"})
_EXAMPLE = "postgresql://user:password@host:5432/name or sqlite:///path/to/file.db"
# The driver in the extra `data`, so that the same address reads the same values everywhere.
_DRIVERS = {"postgresql": "postgresql+pg8000", "postgres": "postgresql+pg8000"}
_TIME_LIMITS = {
    "pg8000": ("timeout",),
    **dict.fromkeys(("psycopg", "psycopg2"), ("connect_timeout",)),
    **dict.fromkeys(("pymysql", "mysqldb"), ("connect_timeout", "read_timeout")),
    "mysqlconnector": ("connection_timeout",),
}
_SECRET_OPTIONS = ("password", "passwd", "pwd", "passfile", "sslkey", "sslpassword")
_NOT_OPENED, _FAILED = "the database cannot be opened", "the query failed"
_NO_LOG = logging.NullHandler()
# The names of the columns, and a function that fetches this many more rows.
Result = tuple[list[str], Callable[[int], Sequence[Any]]]
# The statements before the query; times are in UTC, whatever the server's time zone is.
_SESSIONS = {
    "postgresql": ("SET TIME ZONE 'UTC'",),
    **dict.fromkeys(("mysql", "mariadb"), ("SET SESSION TRANSACTION READ ONLY", "SET SESSION time_zone = '+00:00'")),
    "oracle": ("SET TRANSACTION READ ONLY",),
}
_READS = frozenset({"select", "with", "values", "table"})
# Words that can change data inside a statement that begins with one of these.
_WRITES = frozenset({"insert", "update", "delete", "merge", "replace", "into"})
# Words that are also names of functions: replace(text, old, new), insert(text, position, length, new).
_CALLED = frozenset({"replace", "insert"})

# Databases differ on nested comments, comments that MySQL executes, and backslashes before quotes: these do not match.
_PIECE = r"""(?P<space>\s+|--(?=\s|\Z)[^\n]*|/\*(?!M?!)(?:(?!/\*|\*/).)*+\*/)
    |(?P<quoted>'(?:[^'\\]|''|\\(?!['"]))*+'|"(?:[^"\\]|""|\\(?!['"]))*+"%s)
    |(?P<unclear>['"`]|--|/\*%s)
    |(?P<word>[^\W\d][\w$]*)
    |(?P<other>\d[\w.]*|\$(?:(?:[^\W\d]\w*)?\$)?|.)"""
_DOLLARS = r"|\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$", r"|\$(?:[^\W\d]\w*)?\$"
_BACKTICKS, _BRACKETS = r"|`(?:[^`]|``)*+`", r"|\[[^\]'\"`]*\]"
# Further quotes of a database, and further beginnings that may hide words there.
_QUOTES = {
    **dict.fromkeys(("postgresql", "duckdb", "cockroachdb", "redshift"), _DOLLARS),
    **dict.fromkeys(("mysql", "mariadb"), (_BACKTICKS, r"|\#")),
    **dict.fromkeys(("bigquery", "databricks", "hive"), (_BACKTICKS, "")),
    "sqlite": (_BACKTICKS + _BRACKETS, r"|\["),
    "mssql": (_BRACKETS, r"|\["),
    "oracle": ("", r"|[nN]?[qQ]'"),
}


def read_query(url: str, query: str, config: ExtractConfig) -> Documents:
    """Yields the rows of `query` on the database at `url` through `row_documents`, with the place ``row N``.

    Rows are fetched in batches of about 4 MB. Raises `ExtractionError`: ``invalid`` for a refused address or query,
    ``missing`` for a file or column, ``not_installed`` for a driver, and ``unreadable`` with the database's message,
    after the documents of the rows before the error.
    """
    address = parse_address(url)
    backend = address.get_backend_name()
    require_reading(query, backend)
    open_result = _file_result if backend in _FILE_DATABASES else _server_result
    with open_result(address, query, config) as (columns, fetch):
        rows = fetched_rows(fetch, lambda row: _faults_named(address, f"after row {row}" if row else _FAILED))
        for item in row_documents(config, columns, rows):
            yield from pieces_of(item, config.max_document_bytes) if isinstance(item, Extracted) else (item,)


@contextmanager
def _file_result(address: URL, query: str, config: ExtractConfig) -> Iterator[Result]:
    kind, name = address.get_backend_name(), address.database
    if not name or name == ":memory:" or name.startswith("file:") or address.query:
        raise ExtractionError("invalid", f"give the path of the file alone: {kind}:///path/to/file.db")
    path = Path(name)
    if not path.is_file():
        raise ExtractionError("missing", f"there is no database file {name}")
    with _faults_named(address, _NOT_OPENED):
        connection: Any = open_sqlite(path, longest_record(config)) if kind == "sqlite" else open_duckdb(path, config)
    with closing(connection):
        with _faults_named(address, _FAILED):
            result = connection.execute(query)
            columns = [column[0] for column in result.description]
        yield columns, result.fetchmany


@contextmanager
def _server_result(address: URL, query: str, config: ExtractConfig) -> Iterator[Result]:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    # Errors while a broken connection is closed do not matter; without a handler they would go to stderr.
    logging.getLogger("sqlalchemy").addHandler(_NO_LOG)
    backend = address.get_backend_name()
    with _faults_named(address, _NOT_OPENED):
        target, arguments = connect_arguments(address, config.max_seconds)
        connection = create_engine(
            target, connect_args=arguments, poolclass=NullPool, pool_reset_on_return=None, hide_parameters=True
        ).connect()
    try:
        with _faults_named(address, _NOT_OPENED):
            if backend == "postgresql":
                connection = connection.execution_options(postgresql_readonly=True)
            for statement in _SESSIONS.get(backend, ()):
                connection.exec_driver_sql(statement)
        with _faults_named(address, _FAILED):
            # Without parameters the driver gets the query unchanged, with its colons and percent signs.
            options = {"stream_results": True, "no_parameters": True}
            result = connection.exec_driver_sql(query, execution_options=options)
            columns = list(result.keys())
        yield columns, result.fetchmany
    finally:
        # If this fails, the server is gone and has rolled back itself.
        for step in (connection.rollback, connection.close):
            try:
                step()
            except Exception as error:
                _let_go(error)
                connection.invalidate()


@contextmanager
def _faults_named(address: URL, where: str) -> Iterator[None]:
    """Turns the errors of a driver into `ExtractionError`; `where` says what failed."""
    from sqlalchemy.exc import NoSuchModuleError

    try:
        yield
    except (ExtractionError, MemoryError):
        raise
    except ImportError as error:
        name = error.name or address.get_driver_name()
        raise ExtractionError("not_installed", f"the driver {name} is not installed: pip install {name}") from None
    except NoSuchModuleError:
        detail = f"{address.drivername} is not a known kind of database; is its package installed?"
        raise ExtractionError("not_installed", detail) from None
    except Exception as error:
        _let_go(error)
        raise ExtractionError("unreadable", f"{where}: {without_secrets(_message(error), address)}") from None


def _let_go(error: BaseException | None) -> None:
    """Clears the frames that an exception keeps, because a socket in them would stay open until garbage collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _message(error: Exception) -> str:
    """Returns the database's own message on one line."""
    origin = getattr(error, "orig", None) or error
    first = origin.args[0] if origin.args else ""
    # pg8000 passes the fields of the server's message as a dict.
    message = first.get("M", "") if isinstance(first, dict) else str(origin)
    return " ".join(message.split())[:300] or type(origin).__name__


def parse_address(url: str) -> URL:
    """Parses an address; raises `ExtractionError` if it is invalid or a password has an unescaped ``@`` or ``/``."""
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        detail = f"a query needs SQLAlchemy: pip install 'sheepop[data]' ({error})"
        raise ExtractionError("not_installed", detail) from None
    try:
        address = make_url(url)
    except (SQLAlchemyError, ValueError):
        # The error is not quoted, because it may contain the password.
        detail = f"the address of the database cannot be read; it must look like {_EXAMPLE}"
        raise ExtractionError("invalid", detail) from None
    if address.get_backend_name() not in _FILE_DATABASES and "@" in f"{address.host}{address.database}":
        raise ExtractionError("invalid", "the password in the address contains @ or /; write %40 for @ and %2F for /")
    return address.set(drivername=_DRIVERS.get(address.drivername, address.drivername))


def source_label(url: str) -> str:
    """Returns a displayable name of the database: its kind, host and name, without user, password and options."""
    kind = url.partition("://")[0].partition("+")[0]
    try:
        address = parse_address(url)
    except ExtractionError:
        return f"{kind}://..." if kind.isalnum() and kind != url else "a database"
    kind = address.get_backend_name()
    port = f":{address.port}" if address.port else ""
    return f"{kind}://{address.host or ''}{port}/{address.database or ''}"


def connect_arguments(address: URL, max_seconds: float) -> tuple[URL, dict[str, Any]]:
    """Returns the address and arguments of the driver: time limits, and for pg8000 `sslmode` as in libpq."""
    driver = address.get_driver_name()
    arguments: dict[str, Any] = {name: max(1, round(max_seconds)) for name in _TIME_LIMITS.get(driver, ())}
    if driver == "pg8000" and "sslmode" in address.query:
        mode = str(address.query["sslmode"])
        address = address.difference_update_query(["sslmode"])
        if mode in ("require", "verify-ca", "verify-full"):
            encryption = arguments["ssl_context"] = ssl.create_default_context()
            encryption.check_hostname = mode == "verify-full"
            if mode == "require":
                encryption.verify_mode = ssl.CERT_NONE
        elif mode not in ("disable", "allow", "prefer"):
            raise ExtractionError("invalid", f"sslmode={mode} is not known; use require or verify-full")
    return address, arguments


def without_secrets(message: str, address: URL) -> str:
    """Returns `message` with every password of the address, plain or escaped, replaced by ``***``."""
    for secret in [address.password, *map(address.query.get, _SECRET_OPTIONS)]:
        if isinstance(secret, str) and secret:
            forms = {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
            for form in sorted(forms, key=lambda form: (-len(form), form)):
                message = message.replace(form, "***")
    return message


def require_reading(query: str, dialect: str) -> None:
    """Raises `ExtractionError` unless `query`, in this SQLAlchemy dialect, is one statement that only reads."""
    words = [word for word, _ in _words(query, dialect)]
    while words and words[-1] == ";":
        words.pop()
    if ";" in words:
        raise _refused("it has more than one statement; give a single SELECT")
    first = next((word for word in words if word != "("), None)
    if first is None:
        raise _refused("it is empty; give a SELECT")
    if first not in _READS:
        raise _refused(f"it begins with {first[:40].upper()}; give a SELECT, or a WITH that ends in one")
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word in _WRITES and before != "." and not (word in _CALLED and after == "("):
            raise _refused(f"it contains {word.upper()}, which writes; put quotes around it if it is a name")


def is_ordered(query: str, dialect: str = "") -> bool:
    """Returns whether the outermost SELECT has ORDER BY, without which a database may return rows in any order."""
    try:
        words = list(_words(query, dialect))
    except ExtractionError:
        return False
    outermost = min((depth for word, depth in words if word in _READS), default=0)
    return ("order", "by") in pairwise(word for word, depth in words if depth == outermost)


def _words(query: str, dialect: str) -> Iterator[tuple[str, int]]:
    """Yields each word (in lower case), sign and quoted piece outside comments, with its depth in brackets.

    Raises `ExtractionError` if databases differ on what is a comment, a string or a name.
    """
    depth = 0
    pattern = _PIECE % _QUOTES.get(dialect, ("", ""))
    for match in re.finditer(pattern, query, re.VERBOSE | re.DOTALL):
        text = match[0]
        if match["unclear"]:
            raise _refused(
                f"{text} at character {match.start() + 1} is not closed, or databases differ in what it means; close "
                "it, write -- and a space before a comment, and double a quote inside quotes"
            )
        depth -= text == ")"
        if not match["space"]:
            yield text.lower(), depth
        depth += text == "("


def _refused(why: str) -> ExtractionError:
    return ExtractionError("invalid", f"the query is refused: {why}")
