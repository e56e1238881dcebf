"""The address of a database: what SQLAlchemy needs of it, and a name for it that holds no password."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from sheepop.data.extract.interface import ExtractionError

if TYPE_CHECKING:
    from sqlalchemy import URL

FILE_DATABASES = frozenset({"sqlite", "duckdb"})
_EXAMPLE = "postgresql://user:password@host:5432/name or sqlite:///path/to/file.db"
# The driver that comes with the extra, so that the same address reads the same values everywhere.
_DRIVERS = {"postgresql": "postgresql+pg8000", "postgres": "postgresql+pg8000"}
_TIME_LIMITS = {
    "pg8000": ("timeout",),
    "psycopg": ("connect_timeout",),
    "psycopg2": ("connect_timeout",),
    "pymysql": ("connect_timeout", "read_timeout"),
    "mysqldb": ("connect_timeout", "read_timeout"),
    "mysqlconnector": ("connection_timeout",),
}
_SECRET_OPTIONS = ("password", "passwd", "pwd", "passfile", "sslkey", "sslpassword")


def parse_address(url: str) -> URL:
    """The address as SQLAlchemy takes it.

    Raises `ExtractionError` when it is none, or holds an ``@`` or ``/`` of a password that should be escaped.
    """
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise ExtractionError(
            "not_installed", f"a query needs SQLAlchemy: pip install 'sheepop[data]' ({error})"
        ) from None
    try:
        address = make_url(url)
    except (SQLAlchemyError, ValueError):
        # What went wrong is not quoted: it may hold the password.
        raise ExtractionError(
            "invalid", f"the address of the database cannot be read; it must look like {_EXAMPLE}"
        ) from None
    if address.get_backend_name() not in FILE_DATABASES and "@" in f"{address.host}{address.database}":
        raise ExtractionError("invalid", "the password in the address contains @ or /; write %40 for @ and %2F for /")
    return address.set(drivername=_DRIVERS.get(address.drivername, address.drivername))


def source_label(url: str) -> str:
    """A name for the database that can be shown: its kind, host and name, without user, password and options."""
    kind = url.partition("://")[0].partition("+")[0]
    try:
        address = parse_address(url)
    except ExtractionError:
        return f"{kind}://..." if kind.isalnum() and kind != url else "a database"
    kind = address.get_backend_name()
    if kind in FILE_DATABASES:
        return f"{kind}:///{address.database or ''}"
    port = f":{address.port}" if address.port else ""
    return f"{kind}://{address.host or ''}{port}/{address.database or ''}"


def connect_arguments(address: URL, max_seconds: float) -> tuple[URL, dict[str, Any]]:
    """The address and what is handed to the driver beside it: how long to wait, and for pg8000 encryption.

    `sslmode` means what it means to PostgreSQL's own library.
    """
    driver = address.get_driver_name()
    arguments: dict[str, Any] = {name: max(1, round(max_seconds)) for name in _TIME_LIMITS.get(driver, ())}
    if driver == "pg8000" and "sslmode" in address.query:
        mode = str(address.query["sslmode"])
        address = address.difference_update_query(["sslmode"])
        if mode in ("require", "verify-ca", "verify-full"):
            arguments["ssl_context"] = _encryption(mode)
        elif mode not in ("disable", "allow", "prefer"):
            raise ExtractionError("invalid", f"sslmode={mode} is not known; use require or verify-full")
    return address, arguments


def without_secrets(message: str, address: URL) -> str:
    """`message` with every password of the address, plain or escaped, replaced by ``***``."""
    options = [address.query.get(name) for name in _SECRET_OPTIONS]
    for secret in [address.password, *options]:
        if isinstance(secret, str) and secret:
            forms = {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
            for form in sorted(forms, key=lambda form: (-len(form), form)):
                message = message.replace(form, "***")
    return message


def _encryption(mode: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if mode != "verify-full":
        context.check_hostname = False
    if mode == "require":
        context.verify_mode = ssl.CERT_NONE
    return context
