"""Finds passwords, keys and tokens by the names that they are assigned to, with quotes or without.

It reads assignments in code, shell, ``.env``, INI, TOML, YAML, JSON, XML, connection strings, URLs and headers, and the
lines of ``.netrc``, ``.pgpass`` and files of password hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Assigned(NamedTuple):
    """A secret at ``text[start:end]``, and what it is."""

    start: int
    end: int
    title: str


# What a name ends with, perhaps with a word behind it that changes nothing.
_HINTS = ("pass", "pwd", "secret", "token", "credential", "key", "auth", "bearer", "$")
_NAME_END = (
    r"(?P<word>passw(?:or)?d|passphrase|pwd|pass|secret|token|credentials?|key|auth)"
    r"(?:[_.-]?(?:base|data|value|prod(?:uction)?|dev|staging|live|hash|default|admin|root|primary|secondary|[0-9]{1,3}))?"
)
_VALUE = r"(?:(?P<quote>\\?[\"'`])(?P<quoted>[^\n\"'`\\]{1,2048})(?P=quote)|(?P<bare>[^\s\"'`<>\\]))"
_SEPARATOR = (
    r"(?:\\?[\"']?\]?[ \t]{0,16}(?::=|=>|=(?!=)|:(?!:))[ \t]{0,16}"  # name = value, "name": value, [name] => value
    r"|>|[\"'][ \t]{1,16}value=|[\"'],[ \t]{0,16}(?=[\"'])"  # <name>value, key="name" value="value", "name", "value"
    r"|(?P<blank>[ \t]{1,16}))"  # --name value, ENV NAME value
)
_ASSIGNMENT = re.compile(rf"{_NAME_END}{_SEPARATOR}(?={_VALUE})", re.ASCII)
_NAME_BEGIN = re.compile(r"[A-Za-z0-9_.\-]{0,48}\Z", re.ASCII)
_SHELL_LINE = re.compile(r"(?:^|\n)[ \t-]{0,16}(?:(?:export|set|ENV|ARG)[ \t]+)?\Z")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", re.ASCII)
# Before "key", "pass" and "auth", which alone mean other things; "token" means other things behind these.
_QUALIFIES_KEY = re.compile(
    "api|app|access|secret|private|encrypt(?:ion)?|sign(?:ing)?|master|storage|account|auth|client|service|webhook|"
    "session|license|shared|subscription|consumer|hmac|jwt|deploy(?:ment)?|ssh|integration|write|read"
)
_OTHER_TOKENS = re.compile(
    "pad|eos|bos|unk|cls|sep|mask|special|next|prev(?:ious)?|first|last|stop|start|end|begin|current|new|num|max|min|"
    "total|input|output|prompt|per|in|out|the|a|this|each|image|audio"
)
# Values that stand for others or are known examples.
_REFERENCE = re.compile(
    r"\$[A-Za-z_{(]|%[({A-Za-z]|\{\{|<|@[A-Z_]+@|(?:process\.|os\.)?env(?:iron)?\b|vault:|ref\+|file:|arn:|!(?:Ref|Sub|vault)\b",
    re.IGNORECASE,
)
_EXAMPLE_WORD = re.compile(
    "your|my|the|some|an?|insert|enter|replace|change|put|add|use|with|here|example|sample|dummy|fake|test(?:ing)?|"
    "placeholder|redacted|hidden|todo|fixme|default|null|none|nil|true|false|undefined|optional|required|string|str|"
    "text|bytes|secret|token|key|pass(?:word|wd|phrase)?|pwd|api|user(?:name)?|admin|root|guest|me|it|this|of|for|to|"
    "in|and|x+|abc(?:def)?|foo|bar|baz|qux|postgres|mysql|redis|rabbitmq|scott|tiger|correct|horse|geheim|parole|"
    "0+|1234(?:5(?:6(?:7(?:8(?:90?)?)?)?)?)?"
)
_PIECES = re.compile(r"[a-z]+|[0-9]{4,}")
# Dummy passwords in examples, and variables to be filled in.
DUMMY_PASSWORD = re.compile(
    r".?|pass(?:wor[dt]|wd|phrase|w0rd)?[0-9]{0,3}|pwd?|pswd|my_?password|your_?password|secret|s3cr3t|token|key|api_?key|"
    r"foo|bar|baz|qux|test(?:ing|pass|password)?|changeme|hunter2|admin|root|guest|user(?:name)?|anonymous|postgres|"
    r"mysql|redis|rabbitmq|scott|tiger|[a-z_-]*(?:secret|passw(?:or)?d|token|key)[a-z_-]*|example|dummy|fake|none|null|[x*.\-_]+|\{.*\}|<.*>|%.*%?|.*\{[a-z_.]*\}.*|[a-z]{2,4}",
    re.IGNORECASE,
)
_WORD = r"[0-9]{0,4}(?:[A-Z]?[a-z]{2,}+|[A-Z]{2,}+(?![a-z])|[A-Za-z](?![A-Za-z]))*+[0-9]{0,4}"
_WORDS = re.compile(rf"{_WORD}(?:[_.\-/:]{_WORD})*", re.ASCII)
_EXPRESSION = re.compile(r"\?.*:|[()\[\]{}|*,]|^[&*]|\.[A-Za-z_]+$|->|^[A-Za-z_]\w*\.[A-Za-z_]|::")
_LETTER, _DIGIT = re.compile(r"[A-Za-z]"), re.compile(r"[0-9]")
_PUNCTUATION = re.compile(r"[!#$%?^~]")
_SPECIAL = re.compile(r"[!#$%&*+/=?@^~]")
_BARE = re.compile(r"[^\s\"'`<>\\]{1,8192}")
_FOLLOWING = re.compile(r"[;&,][A-Za-z_ ]{1,40}=|;|&(?=[a-z_]+=)")
_SHORTEST, _SHORTEST_IN_SHELL, _SHORTEST_WITHOUT_DIGIT, _SHORTEST_AUTH = (
    8,
    6,
    16,
    20,
)  # "auth" alone often names a method
_FEWEST_KINDS = 5  # different characters

_BEARER = re.compile(r"\b(?i:bearer|basic)[ \t]+(?P<value>[A-Za-z0-9._~+/-]{16,2048}=*)", re.ASCII)
_NETRC = re.compile(
    r"\blogin[ \t\n]{1,64}[^\s]{1,128}[ \t\n]{1,64}password[ \t\n]{1,64}(?P<value>[^\s\"'\\]{6,256})", re.ASCII
)
_PGPASS = re.compile(r"(?m)^[^\s:#]{1,128}:(?:[0-9]{2,5}|\*):[^\s:]{1,64}:[^\s:]{1,64}:(?P<value>[^\s:]{4,256})$")
_HASH = re.compile(
    r"\$(?:2[abxy]\$[0-9]{2}\$[./A-Za-z0-9]{53}|(?:1|5|6|7|y|apr1|argon2(?:id?|d))\$[./A-Za-z0-9,=$+]{20,256})"
)
_URL = re.compile(r"://:(?P<value>[^\s:/?#@\"'<>]{6,256})@(?=[A-Za-z0-9\[])", re.ASCII)
_SIGNATURE = re.compile(r"[?&]sig=(?P<value>[A-Za-z0-9%+/]{30,128}=?)", re.ASCII)
_FORMS = (
    (_NETRC, "login", "Password"),
    (_PGPASS, ":*:", "Password"),
    (_PGPASS, ":5432:", "Password"),
    (_URL, "://:", "Password"),
    (_SIGNATURE, "sig=", "Signature"),
)


def assigned_secrets(text: str, lower: str) -> Iterator[Assigned]:
    """Yields the secrets in `text`, not in order; `lower` is the text in lower case, of the same length."""
    if any(hint in lower for hint in _HINTS):
        yield from _assignments(text, lower)
        if "bearer" in lower or "basic" in lower:
            for match in _BEARER.finditer(text):
                if _is_secret(match["value"], is_bare=True, is_shell=False):
                    yield Assigned(*match.span("value"), "Authorization Header")
        if "$" in lower:
            for match in _HASH.finditer(text):
                yield Assigned(*match.span(), "Password Hash")
    for pattern, hint, title in _FORMS:
        if hint in lower:
            for match in pattern.finditer(text):
                if not _stands_for_another(match["value"]):
                    yield Assigned(*match.span("value"), title)


def _assignments(text: str, lower: str) -> Iterator[Assigned]:
    done = 0
    for match in _ASSIGNMENT.finditer(lower):
        if match.start() < done:
            continue
        word, is_bare = match["word"], match["quoted"] is None
        begin = _NAME_BEGIN.search(text, max(0, match.start() - 48), match.start())
        start = match.start() if begin is None else begin.start()
        name = text[start : match.end("word")]
        is_argument = name.startswith("-") or lower.endswith("env ", 0, start)
        if (match["blank"] is not None and not is_argument) or text.endswith("://", 0, start):
            continue
        if not _names_a_secret(name, word):
            continue
        first, done = match.span("bare" if is_bare else "quoted")
        done = _end_of_bare(text, first) if is_bare else done
        value = text[first:done]
        is_shell = is_bare and name.isupper() and text[first - 1] == "=" and text[first - 2] not in " \t"
        is_shell = is_shell and _SHELL_LINE.search(text, max(0, start - 32), start) is not None
        if value.lower() == name.lower() or (name == "auth" and len(value) < _SHORTEST_AUTH):
            continue
        if _is_secret(value, is_bare=is_bare, is_shell=is_shell):
            yield Assigned(first, done, "Assigned Secret")


def _names_a_secret(name: str, word: str) -> bool:
    """Whether a name that ends with `word` is that of a secret: ``db_password`` and ``apiKey``, not ``primary_key``."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    last = parts[-1] if parts else ""
    if last != word and not (last.endswith(("password", "passwd", "secret", "apikey", "token", "pwd"))):
        return False
    before = parts[-2] if len(parts) > 1 else ""
    if word == "key":
        return last == "apikey" or _QUALIFIES_KEY.fullmatch(before) is not None
    if word == "pass":
        return bool(before)
    return not (word == "token" and _OTHER_TOKENS.fullmatch(before))


def _end_of_bare(text: str, start: int) -> int:
    """The end of a value without quotes, before the next parameter of a URL or connection string, or punctuation."""
    end = _BARE.match(text, start).end()  # type: ignore[union-attr]
    following = _FOLLOWING.search(text, start, end)
    end = following.start() if following else end
    while end > start and text[end - 1] in ",;:)]}.":
        end -= 1
    return end


def _stands_for_another(value: str) -> bool:
    if _REFERENCE.match(value) or DUMMY_PASSWORD.fullmatch(value):
        return True
    return all(_EXAMPLE_WORD.fullmatch(piece) for piece in _PIECES.findall(value.lower()))


def _is_secret(value: str, *, is_bare: bool, is_shell: bool) -> bool:
    """Whether a value looks like a secret rather than a word, a variable, or an example."""
    if len(set(value)) < _FEWEST_KINDS or " " in value or _stands_for_another(value) or value.isdigit():
        return False
    has_letter, has_digit = _LETTER.search(value) is not None, _DIGIT.search(value) is not None
    if is_shell:
        return len(value) >= _SHORTEST_IN_SHELL and not _EXPRESSION.search(value) and not value.startswith(("/", "."))
    mixes = has_letter and (has_digit or _SPECIAL.search(value) is not None)
    if is_bare and not has_digit and len(value) < _SHORTEST_WITHOUT_DIGIT:
        mixes = has_letter and _PUNCTUATION.search(value) is not None and value != value.lower() != value.upper()
    if is_bare and _EXPRESSION.search(value):
        return False
    is_path = value.startswith(("/", "./", "http://", "https://")) and not value.endswith("=")
    return len(value) >= _SHORTEST and mixes and not is_path and _WORDS.fullmatch(value) is None
