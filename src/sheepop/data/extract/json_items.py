"""The items of a JSON list of any length, one in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sheepop.data.extract.interface import RecordError

_SPACE = re.compile(r"[ \t\r\n]*")
# To the next mark, and to the end of a string; the group is empty where the text ends before.
_MARK = re.compile(r'[^"\[\]{},]*+(["\[\]{},]?)')
_STRING = re.compile(r'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
# A number this near to the end of what was read may go on behind it: 1.5e+ is 1.5 and something else.
_LONGEST_TAIL = 16


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `RecordError` where it is invalid, names a key twice or is nested too deeply."""
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise RecordError("invalid", "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RecordError("invalid", f"{error.msg}, character {error.pos + 1:,}") from None
    except ValueError as error:
        raise RecordError("invalid", str(error)) from None


class JsonItems:
    """The items of the list that the blocks of text hold, numbered from 1; to be read once.

    An item that is not valid, or longer than `max_characters`, comes as a `RecordError`, and reading goes on behind
    it. Raises `RecordError` where the list itself breaks off or goes wrong.
    """

    def __init__(self, blocks: Iterator[str], max_characters: int) -> None:
        self._blocks, self._max = blocks, max_characters
        self._text, self._at, self._number = "", 0, 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._mark() != "[":
            raise RecordError("invalid", "it does not begin with a list")
        self._at += 1
        mark = self._mark()
        while mark != "]":
            if self._number and mark != ",":
                raise RecordError("invalid", f"after item {self._number}, {_found(mark)} where a comma should be")
            if self._number:
                self._at += 1
                self._mark()
            self._number += 1
            yield self._number, self._item()
            mark = self._mark()
        self._at += 1
        if mark := self._mark():
            raise RecordError("invalid", f"after the list, {_found(mark)}")

    def _item(self) -> Any:
        if self._at >= len(self._text):
            raise RecordError("invalid", f"the list breaks off before item {self._number}")
        try:
            value, end = _decoder.raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            return self._item_by_its_marks()
        if isinstance(value, int | float) and end > len(self._text) - _LONGEST_TAIL:
            return self._item_by_its_marks()
        self._at = end
        return value

    def _item_by_its_marks(self) -> Any:
        """An item that is not valid, too long, or not read to its end: brackets and quotes tell where it ends."""
        text, is_whole = self._passed_over()
        try:
            if text is None:
                raise RecordError("oversized", f"the item is over {self._max:,} characters")
            return parse_json(text)
        except RecordError as error:
            if not is_whole:
                raise RecordError(error.reason, f"item {self._number}: {error.detail}") from None
            return error

    def _passed_over(self) -> tuple[str | None, bool]:
        """The text of the next item, None when it is too long to be held, and whether it ends before the blocks do."""
        begin, depth, is_long, pattern = self._at, 0, False, _MARK
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            is_long = is_long or self._at - begin > self._max
            if not match[1]:
                begin = self._at if is_long else begin
                if not self._read(begin):
                    return None if is_long else self._text[begin:], False
                begin = 0
            elif match[1] == '"':
                pattern = _STRING if pattern is _MARK else _MARK
            elif match[1] in "[{":
                depth += 1
            elif depth == 0:
                self._at -= 1
                return None if is_long else self._text[begin : self._at], True
            elif match[1] != ",":
                depth -= 1

    def _mark(self) -> str:
        """The next character that is no white space, or nothing at the end; it is not passed over."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read(self._at):
                return ""

    def _read(self, begin: int) -> bool:
        """Reads a block more and forgets the text before `begin`; False when there was none."""
        block = next(self._blocks, None)
        if block is None:
            return False
        self._text, self._at = self._text[begin:] + block, self._at - begin
        return True


def _found(mark: str) -> str:
    return f"there is {mark!r}" if mark else "the file ends"


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return record


_decoder = json.JSONDecoder(object_pairs_hook=_record)
