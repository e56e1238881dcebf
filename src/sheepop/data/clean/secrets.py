"""Replaces keys, tokens and passwords that stand in code, configuration and text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from sheepop.data.clean import secret_shapes as shapes
from sheepop.data.clean.config import SecretsConfig
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.placeholders import Placeholders
from sheepop.data.clean.stage import ChangeStage
from sheepop.data.documents import Draft

_BEFORE, _AFTER = 64, 2
_LONGEST_LINE = 2000
_TOKEN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_BREAKS = bytes(code not in _TOKEN for code in range(256))
_HAS_DIGIT = re.compile(r"[0-9]")
_NOT_KEY_MATERIAL = re.compile(r"[^A-Za-z0-9+/=]+")
_CONFIGURABLE = {
    "entropy": ("Base64HighEntropyString", "HexHighEntropyString"),
    "keyword": ("KeywordDetector",),
}


class Secret(NamedTuple):
    """A secret in the text: where it stands, and what it is."""

    start: int
    end: int
    title: str


class Detector(Protocol):
    """What is used of a detector of detect-secrets."""

    secret_type: str

    def analyze_string(self, string: str) -> Iterator[str]:
        """The secrets in a string; unlike ``analyze_line`` it never asks a server whether they are valid."""


class SecretsReplacement(ChangeStage):
    """Puts a placeholder such as ``<SECRET_3f2a>`` in place of every secret that a detector of detect-secrets finds.

    Some detectors are made stricter: a token of random characters must hold a digit, and a password in a URL must
    not be a word that examples use. Private keys are replaced from their first line to their last.
    """

    name = "secrets"

    def __init__(self, ledger: Ledger, config: SecretsConfig, *, seed: int) -> None:
        super().__init__(ledger)
        self.config = config
        self.placeholders = Placeholders(seed, config.salt)

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The text with placeholders, and how many of each kind."""
        found = find_secrets(text)
        if self.config.detectors:
            names = [name for choice in self.config.detectors for name in _CONFIGURABLE[choice]]
            found = _without_overlaps([*found, *_in_lines(text, names)])
        if not found:
            return text, {}
        pieces: list[str] = []
        position = 0
        for secret in found:
            value = text[secret.start : secret.end]
            pieces += (text[position : secret.start], self.placeholders.of("SECRET", value))
            position = secret.end
        return "".join((*pieces, text[position:])), Counter(secret.title for secret in found)


def find_secrets(text: str) -> list[Secret]:
    """The secrets in `text` in the order in which they stand; they do not overlap."""
    lower = text.lower() if text.isascii() else text.encode("ascii", "replace").decode("ascii").lower()
    return _without_overlaps([*_private_keys(text), *_by_hint(text, lower), *_by_run(text)])


def _without_overlaps(found: list[Secret]) -> list[Secret]:
    chosen: list[Secret] = []
    for secret in sorted(found, key=lambda secret: (secret.start, -secret.end)):
        if not chosen or secret.start >= chosen[-1].end:
            chosen.append(secret)
    return chosen


def _private_keys(text: str) -> Iterator[Secret]:
    if "PRIVATE KEY" in text:
        begin = shapes.KEY_BEGINS.search(text)
        end = shapes.KEY_ENDS.search(text)
        while begin:
            following = shapes.KEY_BEGINS.search(text, begin.end())
            if end and end.start() < begin.end():
                end = shapes.KEY_ENDS.search(text, begin.end())
            key_end = _end_of_key(text, begin.end(), following and following.start(), end)
            if shapes.KEY_BODY.search(text, begin.end(), key_end):
                yield Secret(begin.start(), key_end, "Private Key")
            begin = following
    if "PuTTY-User-Key-File-" in text:
        for match in shapes.PUTTY_KEY.finditer(text):
            yield Secret(match.start(), match.end(), "Private Key")


def _end_of_key(text: str, start: int, following: int | None, end: re.Match[str] | None) -> int:
    """Where a key ends whose material begins at `start`, before the next key begins."""
    limit = min(start + shapes.LONGEST_KEY, len(text) if following is None else following)
    if end and end.start() <= limit:
        return end.end()
    # The key was cut short: what is left of it ends with its last line of key material.
    return _key_lines(text, start, limit)


def _key_lines(text: str, start: int, limit: int) -> int:
    """Where the lines that hold nothing but key material, and perhaps quotes, end."""
    end = start
    for line in text[start:limit].splitlines(keepends=True):
        material = _NOT_KEY_MATERIAL.sub("", line)
        if line.strip() and (len(material) < 16 or " " in line.strip()):
            break
        end += len(line)
    return start + len(text[start:end].rstrip())


def _by_hint(text: str, lower: str) -> Iterator[Secret]:
    for shape in shapes.TEXT_SHAPES:
        if shape.hints[0] in lower:
            for match in shape.segment.finditer(text):
                yield from _confirmed(text, match, shape)


def _by_run(text: str) -> Iterator[Secret]:
    """Secrets around long runs of letters, digits, hyphens and underscores, which few words of a text are."""
    codes = np.frombuffer(b"".join((b"\n", text.encode("ascii", "replace"), b"\n")).translate(_BREAKS), dtype=bool)
    breaks = np.flatnonzero(codes)
    long = np.flatnonzero(np.diff(breaks) > shapes.SHORTEST_RUN)
    for start, end in zip(breaks[long].tolist(), (breaks[long + 1] - 1).tolist(), strict=True):
        if end - start <= shapes.LONGEST_RUN:
            yield from _around(text, start, end)


def _around(text: str, start: int, end: int) -> Iterator[Secret]:
    before = max(0, start - _BEFORE)
    if _HAS_DIGIT.search(text, start, end) or shapes.RUN_PREFIX.match(text, start, end):
        near = text[before : end + _AFTER]
        for shape in shapes.RUN_SHAPES:
            for hint in shape.hints:
                if hint in near:
                    for match in shape.segment.finditer(text, before, end + _AFTER):
                        yield from _confirmed(text, match, shape)
                    break
    if end - start in shapes.ASSIGNED_LENGTHS and shapes.ASSIGNMENT.search(text[before:start]):
        run = text[start:end]
        for name in shapes.ASSIGNED:
            found = any(value == run for value in _detectors()[name].analyze_string(text[before : end + 1]))
            if found and (name == "CloudantDetector" or _HAS_DIGIT.search(run)):
                yield Secret(start, end, _detectors()[name].secret_type)
                return


def _confirmed(text: str, match: re.Match[str], shape: shapes.Shape) -> Iterator[Secret]:
    start, end = match.span("value" if "value" in shape.segment.groupindex else 0)
    if shape.detector is None:
        yield Secret(start, end, shape.title)
        return
    if shape.detector == "BasicAuthDetector":
        if shapes.DUMMY_PASSWORD.fullmatch(text, start, end):
            return
    elif not _HAS_DIGIT.search(text, start, end):
        return
    detector = _detectors()[shape.detector]
    context = text[max(0, match.start() - 1) : match.end() + 1]
    if any(True for _ in detector.analyze_string(context)):
        yield Secret(start, end, detector.secret_type)


def _in_lines(text: str, names: list[str]) -> Iterator[Secret]:
    """What the named detectors find line by line; lines of more than 2,000 characters hold data and are passed over."""
    position = 0
    for line in text.splitlines(keepends=True):
        if len(line) <= _LONGEST_LINE:
            for name in names:
                for value in _values_in_line(name, line):
                    start = position + line.index(value)
                    yield Secret(start, start + len(value), _detectors()[name].secret_type)
        position += len(line)


def _values_in_line(name: str, line: str) -> list[str]:
    detector: Any = _detectors()[name]
    # Only analyze_line holds a string's entropy against the limit; the set that it returns has no fixed order.
    values = sorted(str(secret.secret_value) for secret in detector.analyze_line(filename="", line=line))
    return [value for value in values if value and value in line]


@cache
def _detectors() -> Mapping[str, Detector]:
    """The detectors of detect-secrets by the names of their classes."""
    from detect_secrets.settings import default_settings, get_plugins

    with default_settings():
        return {type(plugin).__name__: cast(Detector, plugin) for plugin in get_plugins()}
