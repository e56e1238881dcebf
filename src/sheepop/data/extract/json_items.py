"""The items of a JSON list of any length, one in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sheepop.data.extract.interface import RecordError

_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["\[\]{},]')
_IN_STRING = re.compile(r'["\\]')
# An error, or a number, this near to the end of what was read may come from the end.
_NEAR_END = 16


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `RecordError` where it is not valid, names a key twice or nests too deeply."""
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

    An item that is not valid, or longer than `max_characters`, comes as an `RecordError`, and reading goes on behind
    it. Raises `RecordError` where the list itself breaks off or goes wrong.
    """

    def __init__(self, blocks: Iterator[str], max_characters: int) -> None:
        self._blocks, self._max = blocks, max_characters
        self._text, self._at, self._is_ended = "", 0, False
        self._number = 0

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
        while True:
            try:
                value, end = _decoder.raw_decode(self._text, self._at)
            except RecursionError:
                return self._skipped(RecordError("invalid", "nested too deeply"))
            except json.JSONDecodeError as error:
                if not self._may_go_on(error):
                    return self._skipped(RecordError("invalid", f"{error.msg}, character {error.pos - self._at + 1:,}"))
            except ValueError as error:
                return self._skipped(RecordError("invalid", str(error)))
            else:
                # A number near the end of what was read may go on behind it.
                is_whole = not isinstance(value, int | float) or len(self._text) - end >= _NEAR_END
                if is_whole or self._is_ended:
                    self._at = end
                    return value
            if len(self._text) - self._at > self._max:
                return self._skipped(RecordError("oversized", f"the item is over {self._max:,} characters"))
            # Twice as much each time, so that a long item is not parsed from its beginning again and again.
            self._read(len(self._text) - self._at)

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        if self._is_ended:
            return False
        return error.pos >= len(self._text) - _NEAR_END or error.msg.startswith("Unterminated string")

    def _skipped(self, error: RecordError) -> RecordError:
        """`error`, after passing over the item by its brackets and quotes alone."""
        depth = 0
        while True:
            match = self._next(_STRUCTURE)
            if match is None:
                raise RecordError(error.reason, f"item {self._number}: {error.detail}; its end was not found")
            if match == '"':
                while (mark := self._next(_IN_STRING)) == "\\":
                    if self._at >= len(self._text):
                        self._read()
                    self._at += 1
                if mark is None:
                    raise RecordError(error.reason, f"item {self._number}: {error.detail}; a string is not closed")
            elif match in "[{":
                depth += 1
            elif depth == 0:
                self._at -= 1
                return error
            elif match != ",":
                depth -= 1

    def _next(self, pattern: re.Pattern[str]) -> str | None:
        """The next character that fits, passed over together with all before it."""
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._read():
                return None
        self._at = match.end()
        return match[0]

    def _mark(self) -> str:
        """The next character that is no white space, or nothing at the end; it is not passed over."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self, least: int = 1) -> bool:
        """Reads at least so many characters more, and forgets those passed over; False when there were none."""
        blocks, size = [self._text[self._at :]], 0
        while size < least:
            block = next(self._blocks, None)
            if block is None:
                self._is_ended = True
                break
            blocks.append(block)
            size += len(block)
        self._text, self._at = "".join(blocks), 0
        return size > 0


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
