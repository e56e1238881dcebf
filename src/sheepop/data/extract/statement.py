"""What a statement of SQL does, told from its words: whether it only reads, and whether it orders its rows.

Databases differ in what is a comment, a string or a name. Where one of them could find other words than are found
here, the statement is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

_READS = frozenset({"select", "with", "values", "table"})
# What can change something inside a statement that begins with one of these.
_WRITES = frozenset({"insert", "update", "delete", "merge", "replace", "into"})
# Also the names of functions: replace(text, old, new), insert(text, position, length, new).
_CALLED = frozenset({"replace", "insert"})

# No comment in a comment, none that MySQL executes, no backslash before a quote: these are read in different ways.
_PIECE = r"""(?P<space>\s+|--(?=\s|\Z)[^\n]*|/\*(?!M?!)(?:(?!/\*|\*/).)*+\*/)
    |(?P<quoted>'(?:[^'\\]|''|\\(?!['"]))*+'|"(?:[^"\\]|""|\\(?!['"]))*+"%s)
    |(?P<unclear>['"`]|--|/\*%s)
    |(?P<word>[^\W\d][\w$]*)
    |(?P<other>\d[\w.]*|\$(?:(?:[^\W\d]\w*)?\$)?|.)"""
_DOLLARS = r"|\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$", r"|\$(?:[^\W\d]\w*)?\$"
_BACKTICKS, _BRACKETS = r"|`(?:[^`]|``)*+`", r"|\[[^\]'\"`]*\]"
# What else quotes in a database, and what else may hide words there.
_QUOTES = {
    **dict.fromkeys(("postgresql", "duckdb", "cockroachdb", "redshift"), _DOLLARS),
    **dict.fromkeys(("mysql", "mariadb"), (_BACKTICKS, r"|\#")),
    **dict.fromkeys(("bigquery", "databricks", "hive"), (_BACKTICKS, "")),
    "sqlite": (_BACKTICKS + _BRACKETS, r"|\["),
    "mssql": (_BRACKETS, r"|\["),
    "oracle": ("", r"|[nN]?[qQ]'"),
}


class StatementError(ValueError):
    """A statement that is not certain to read only; the message says what stands in it and what to write instead."""


def require_reading(query: str, dialect: str) -> None:
    """Raises `StatementError` unless `query` is a single SELECT, WITH, VALUES or TABLE statement that only reads.

    `dialect` is the name of the database in a SQLAlchemy URL: ``postgresql``, ``sqlite``, ``mysql``.
    """
    words = [word for word, _ in _words(query, dialect)]
    while words and words[-1] == ";":
        words.pop()
    if ";" in words:
        raise StatementError("it has more than one statement; give a single SELECT")
    first = next((word for word in words if word != "("), None)
    if first is None:
        raise StatementError("it is empty; give a SELECT")
    if first not in _READS:
        raise StatementError(f"it begins with {first[:40].upper()}; give a SELECT, or a WITH that ends in one")
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word in _WRITES and before != "." and not (word in _CALLED and after == "("):
            raise StatementError(f"it contains {word.upper()}, which writes; put quotes around it if it is a name")


def is_ordered(query: str, dialect: str = "") -> bool:
    """Whether the outermost SELECT of `query` has ORDER BY, without which a database may give rows in any order."""
    try:
        words = list(_words(query, dialect))
    except StatementError:
        return False
    outermost = min((depth for word, depth in words if word in _READS), default=0)
    return ("order", "by") in pairwise(word for word, depth in words if depth == outermost)


def _words(query: str, dialect: str) -> Iterator[tuple[str, int]]:
    """The words in lower case, signs and quoted pieces outside comments, and in how many brackets each stands.

    Raises `StatementError` where databases would disagree.
    """
    depth = 0
    for match in _pattern(dialect).finditer(query):
        text = match[0]
        if match["unclear"]:
            raise StatementError(
                f"{text} at character {match.start() + 1} is not closed, or databases differ in what it means; close "
                "it, write -- and a space before a comment, and double a quote inside quotes"
            )
        depth -= text == ")"
        if not match["space"]:
            yield text.lower(), depth
        depth += text == "("


@lru_cache
def _pattern(dialect: str) -> re.Pattern[str]:
    return re.compile(_PIECE % _QUOTES.get(dialect, ("", "")), re.VERBOSE | re.DOTALL)
