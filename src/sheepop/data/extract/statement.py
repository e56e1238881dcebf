"""What a statement of SQL does, told from its words: whether it only reads, and whether it orders its rows.

Databases differ in what is a comment, a string or a name. Where one of them could find other words than are found
here, the statement is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_READS = frozenset({"select", "with", "values", "table"})
# What can change something inside a statement that begins with one of these.
_WRITES = frozenset({"insert", "update", "delete", "merge", "replace", "into"})
# Also the names of functions: replace(text, old, new), insert(text, position, length, new).
_CALLED = frozenset({"replace", "insert"})

_HAS_DOLLAR_STRINGS = frozenset({"postgresql", "duckdb", "cockroachdb", "redshift"})
_HAS_BACKTICKS = frozenset({"mysql", "mariadb", "sqlite", "bigquery", "databricks", "hive"})
_HAS_BRACKETS = frozenset({"sqlite", "mssql"})
_HAS_HASH_COMMENTS = frozenset({"mysql", "mariadb"})

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<line>--[^\n]*)
    |(?P<block>/\*.*?(?:\*/|\Z))
    |(?P<string>'(?:[^']|'')*+')
    |(?P<quoted>"(?:[^"]|"")*+"|`(?:[^`]|``)*+`)
    |(?P<dollar>\$(?P<tag>(?:[^\W\d]\w*)?)\$)
    |(?P<word>[^\W\d][\w$]*)
    |(?P<number>\d[\w.]*)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


class StatementError(ValueError):
    """A statement that is not certain to read only; the message says what stands in it and what to write instead."""


@dataclass(frozen=True, slots=True)
class _Token:
    """A word in lower case, a sign, or a quoted name or string; `depth` counts the brackets it stands in."""

    kind: str
    text: str
    depth: int


def require_reading(query: str, dialect: str) -> None:
    """Raises `StatementError` unless `query` is a single SELECT, WITH, VALUES or TABLE statement that only reads.

    `dialect` is the name of the database in a SQLAlchemy URL: ``postgresql``, ``sqlite``, ``mysql``.
    """
    tokens = list(_tokens(query, dialect))
    while tokens and tokens[-1].text == ";":
        tokens.pop()
    if any(token.text == ";" for token in tokens):
        raise StatementError("it has more than one statement; give a single SELECT")
    first = next((token for token in tokens if token.text != "("), None)
    if first is None:
        raise StatementError("it is empty; give a SELECT")
    if first.kind != "word" or first.text not in _READS:
        raise StatementError(f"it begins with {first.text[:40].upper()}; give a SELECT, or a WITH that ends in one")
    for index, token in enumerate(tokens):
        is_column = index > 0 and tokens[index - 1].text == "."
        is_call = token.text in _CALLED and index + 1 < len(tokens) and tokens[index + 1].text == "("
        if token.kind == "word" and token.text in _WRITES and not is_column and not is_call:
            raise StatementError(
                f"it contains {token.text.upper()}, which writes; put quotes around it if it is a name"
            )


def is_ordered(query: str, dialect: str = "") -> bool:
    """Whether the outermost SELECT of `query` has ORDER BY, without which a database may give rows in any order."""
    try:
        tokens = list(_tokens(query, dialect))
    except StatementError:
        return False
    outermost = min((token.depth for token in tokens if token.kind == "word" and token.text in _READS), default=0)
    words = [(token.kind, token.text) for token in tokens if token.depth == outermost]
    return any(pair == (("word", "order"), ("word", "by")) for pair in pairwise(words))


def _tokens(query: str, dialect: str) -> Iterator[_Token]:
    """The words, signs and quoted pieces outside comments; raises `StatementError` where databases would disagree."""
    depth = position = 0
    while position < len(query):
        match = _TOKEN.match(query, position)
        if match is None:
            raise StatementError(f"{query[position]!r} cannot be read")
        position = match.end()
        kind, text = match.lastgroup or "", match[0]
        if kind in ("space", "line", "block"):
            _check_comment(kind, text)
            continue
        if kind == "tag" or (kind == "dollar" and dialect in _HAS_DOLLAR_STRINGS):
            kind = "dollar"
        if kind == "dollar" and dialect in _HAS_DOLLAR_STRINGS:
            end = query.find(text, position)
            if end < 0:
                raise StatementError(f"the string that begins with {text[:40]} is not closed")
            kind, position = "string", end + len(text)
        elif text == "[" and dialect in _HAS_BRACKETS:
            kind, position = "quoted", _behind_bracket(query, position)
        else:
            _check_quotes(kind, text, dialect)
        if text == ")":
            depth -= 1
        yield _Token(kind, text.lower() if kind == "word" else text, depth)
        if text == "(":
            depth += 1


def _check_comment(kind: str, text: str) -> None:
    if kind == "line" and not text[2:3].isspace() and len(text) > 2:
        raise StatementError(
            "a comment begins with -- and no space, which some databases read as arithmetic; add a space"
        )
    if kind == "block" and not (text.endswith("*/") and len(text) > 3):
        raise StatementError("a comment is not closed; write */ at its end")
    if kind == "block" and ("/*" in text[2:] or text[2:3] == "!" or text[2:4].upper() == "M!"):
        raise StatementError("a comment contains another, or is one that some databases execute; leave it out")


def _check_quotes(kind: str, text: str, dialect: str) -> None:
    if kind in ("string", "quoted") and ("\\'" in text or '\\"' in text):
        raise StatementError("there is a backslash before a quote; double a quote inside quotes instead")
    if kind == "quoted" and text[0] == "`" and dialect not in _HAS_BACKTICKS:
        raise StatementError('names in this database are quoted with ", not with `')
    if kind == "other" and text in "'\"`":
        raise StatementError(f"a quote {text} is not closed")
    if text == "#" and dialect in _HAS_HASH_COMMENTS:
        raise StatementError("a comment begins with #; write -- and a space instead")
    if kind == "word" and dialect == "oracle" and text.lower() in ("q", "nq"):
        raise StatementError("a string begins with q; write '...' and double the quotes inside it")


def _behind_bracket(query: str, position: int) -> int:
    """Where a name in square brackets ends; one that holds quotes would be read otherwise by other rules."""
    end = query.find("]", position)
    if end < 0:
        raise StatementError("a name in [ is not closed")
    if set(query[position:end]) & set("'\"`"):
        raise StatementError('a name in square brackets contains a quote; quote the name with " instead')
    return end + 1
