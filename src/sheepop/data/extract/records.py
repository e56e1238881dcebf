"""Turns JSON and JSON lines into documents: one for each record, and other JSON as code."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count, islice
from typing import Any

from sheepop.data.decoding import decode
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused, Span
from sheepop.data.extract.template import RecordFormat, is_chat, longest_record, no_column, turns_text
from sheepop.data.extract.text import Lines, byte_lines, cut_lines, open_utf8

_BLOCK = 2**20
# The memory of parsed JSON, as a multiple of its text, in all but contrived files.
_PARSED_SIZE = 12
# JSON as editors write it: comments, and a comma after the last item. Strings are matched so that they are kept.
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*+")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+")|,(?=\s*+[\]}])', re.DOTALL)
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_STRUCTURE = re.compile(r'["\[\]{},]')
_IN_STRING = re.compile(r'["\\]')
# An error or a number this near to the end of the text that was read may be due to the missing rest.
_NEAR_END = 16

_Reader = Callable[[Content, ExtractConfig], Documents]


def extract_jsonl(content: Content, context: Context) -> Documents:
    """Yields one document for each line that is a JSON record, made by `RecordFormat`, with the place ``line N``.

    A line that is not valid JSON, repeats a key, or is over twice the longest document is refused alone. A file with a
    JSON list instead is read like in `extract_json`.
    """
    yield from _reader(content, context.config, _line_documents)(content, context.config)


def extract_json(content: Content, context: Context) -> Documents:
    """Yields one document for each record of a list, with the place ``item N``; other JSON is one document of code.

    A list is streamed. Records inside the lists, columns or fields of a single record count too, if they have the
    configured field or a well-known one. A file with a record on every line is read as JSON lines.
    """
    yield from _reader(content, context.config, _value_documents)(content, context.config)


def cut_jsonl(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields the spans of a file that `extract_jsonl` reads line by line; see `Cutter`."""
    if _reader(content, context.config, _line_documents) is _line_documents:
        yield from cut_lines(content, part_bytes)


def cut_json(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields the spans of a file that `extract_json` reads line by line; see `Cutter`."""
    if _reader(content, context.config, _value_documents) is _line_documents:
        yield from cut_lines(content, part_bytes)


def _reader(content: Content, config: ExtractConfig, otherwise: _Reader) -> _Reader:
    """Returns the reader of JSON lines or of a list if the first two lines show one of these, else `otherwise`."""
    if content.span is not None:
        return _line_documents
    with open_utf8(content) as file:
        # For a line that is too long, the first character is enough.
        begin = file.peek(_BLOCK).strip()[:1]
        lines = ((begin if line is None else line).strip() for line in byte_lines(file, longest_record(config)))
        first, second = [*islice(filter(None, lines), 2), b"", b""][:2]
    if second and first.startswith((b"{", b"[")):
        with suppress(ExtractionError):
            parse_json(first.decode("utf-8", "replace"))
            return _line_documents
    return _list_documents if first.startswith(b"[") else otherwise


def _line_documents(content: Content, config: ExtractConfig) -> Documents:
    form, most = RecordFormat.of(config), longest_record(config)
    is_empty = True
    for number, line in Lines(content, most):
        if isinstance(line, str) and line.isspace():
            continue
        is_empty = False
        try:
            if isinstance(line, ExtractionError):
                raise line
            record = parse_json(line)
        except ExtractionError as error:
            yield Refused(f"line {number}", error.reason, error.detail)
        else:
            yield form.document(record, f"line {number}", most)
    if is_empty:
        raise ExtractionError("empty", "it has only blank lines")


def _list_documents(content: Content, config: ExtractConfig) -> Documents:
    form, most = RecordFormat.of(config), longest_record(config)
    are_records = bool(form.names)
    for number, item in JsonItems(_text_blocks(content), most):
        if isinstance(item, ExtractionError):
            yield Refused(f"item {number}", item.reason, item.detail)
        elif are_records or _is_record(item):
            yield form.document(item, f"item {number}", most)
        else:
            break
        are_records = True
    if not are_records:
        yield Extracted(_whole(content, config)[0], "code", "json")


def _is_record(item: object) -> bool:
    """Returns whether a list that begins with `item` has documents: records, conversations, texts of several words."""
    if isinstance(item, str):
        return len(item.split(None, 1)) > 1
    return isinstance(item, Mapping) or turns_text(item) is not None


def _value_documents(content: Content, config: ExtractConfig) -> Documents:
    text, value = _whole(content, config)
    form = RecordFormat.of(config)
    fields = value if isinstance(value, dict) else {}
    is_empty = True
    for place, record in _records_within(fields, form):
        is_empty = False
        yield form.document(record, place, longest_record(config))
    if is_empty and form.names:
        raise ExtractionError("missing", no_column(form.names[0], tuple(fields)))
    if is_empty:
        yield Extracted(text, "code", "json")


def _records_within(value: dict[str, Any], form: RecordFormat) -> Iterator[tuple[str, Any]]:
    """Yields (place, record) with the text of `form`: rows of columns, else `value`, else its fields, or list items."""
    rows = _columns(value)
    first = next(rows, None)
    if first is not None and form.holds_text(first):
        yield from ((f"row {number}", row) for number, row in enumerate(chain([first], rows), 1))
    elif form.holds_text(value) if form.names else is_chat(value):
        yield "", value
    elif len(value) > 1 and all(form.holds_text(field) for field in value.values()):
        yield from ((f"item {name}", field) for name, field in value.items())
    else:
        for name, field in value.items():
            if isinstance(field, list) and field and form.holds_text(field[0]):
                yield from ((f"{name} item {number}", item) for number, item in enumerate(field, 1))


def _columns(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table that is stored by column: as lists of one length, or as records with the same keys."""
    fields = list(value.values())
    if fields and all(isinstance(field, list) for field in fields) and len(set(map(len, fields))) == 1:
        for values in zip(*fields, strict=True):
            yield dict(zip(value, values, strict=True))
    elif fields and all(isinstance(field, dict) and field.keys() == fields[0].keys() for field in fields):
        for key in fields[0]:
            yield {name: field[key] for name, field in value.items()}


def _whole(content: Content, config: ExtractConfig) -> tuple[str, Any]:
    """Returns the text of a file and its JSON value; comments and trailing commas are allowed."""
    max_bytes = config.max_memory_bytes // _PARSED_SIZE
    if content.size > max_bytes:
        remedy = "a list of records or JSON lines can be of any size"
        raise ExtractionError("oversized", f"{content.size:,} bytes of one JSON value, over {max_bytes:,}; {remedy}")
    text = decode(content.read()).text
    try:
        return text, parse_json(text)
    except ExtractionError as error:
        with suppress(ExtractionError):
            return text, parse_json(_LAST_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text)))
        raise error from None


def parse_json(text: str) -> Any:
    """Returns the value of JSON text; raises `ExtractionError` if it is invalid, repeats a key or nests too deeply."""
    try:
        return _decoder.decode(text)
    except (RecursionError, ValueError) as error:
        raise _named(error) from None


def _named(error: Exception, begin: int = 0) -> ExtractionError:
    """Returns the error as `ExtractionError`; the value begins at `begin` in the parsed text."""
    if isinstance(error, json.JSONDecodeError):
        return ExtractionError("invalid", f"{error.msg}, character {error.pos - begin + 1:,}")
    return ExtractionError("invalid", "nested too deeply" if isinstance(error, RecursionError) else str(error))


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return record


_decoder = json.JSONDecoder(object_pairs_hook=_record)


def _text_blocks(content: Content) -> Iterator[str]:
    try:
        with open_utf8(content) as file:
            yield from codecs.iterdecode(iter(lambda: file.read(_BLOCK), b""), "utf-8")
    except UnicodeDecodeError as error:
        raise ExtractionError("undecodable", f"it is not UTF-8 ({error.reason})") from None


class JsonItems:
    """Iterates once over the numbered items of a JSON list in blocks of text, with one item in memory at a time.

    It yields an `ExtractionError` for an item that is invalid or longer than `max_characters`, and continues after it.
    Raises `ExtractionError` if the list itself ends early or is invalid.
    """

    def __init__(self, blocks: Iterator[str], max_characters: int) -> None:
        self._blocks, self._max = blocks, max_characters
        self._text, self._at, self._is_ended = "", 0, False
        self._number = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._mark() != "[":
            raise ExtractionError("invalid", "it does not begin with a list")
        for self._number in count(1):
            self._at += 1
            mark = self._mark()
            if mark == "]" and self._number == 1:
                break
            if not mark:
                raise ExtractionError("invalid", f"the list ends before item {self._number}")
            yield self._number, self._item()
            mark = self._mark()
            if mark == "]":
                break
            if mark != ",":
                raise ExtractionError("invalid", f"after item {self._number}, {_found(mark)} where a comma should be")
        self._at += 1
        if mark := self._mark():
            raise ExtractionError("invalid", f"after the list, {_found(mark)}")

    def _item(self) -> Any:
        while True:
            try:
                value, end = _decoder.raw_decode(self._text, self._at)
            except (RecursionError, ValueError) as error:
                if self._is_ended or not self._may_come_from_end(error):
                    return self._skipped(_named(error, self._at))
            else:
                # A number near the end of the text that was read may continue after it.
                is_whole = not isinstance(value, int | float) or len(self._text) - end >= _NEAR_END
                if is_whole or self._is_ended:
                    self._at = end
                    return value
            if len(self._text) - self._at > self._max:
                return self._skipped(ExtractionError("oversized", f"the item is over {self._max:,} characters"))
            # The text is doubled each time, so that a long item is parsed from its beginning only a few times.
            self._read(len(self._text) - self._at)

    def _may_come_from_end(self, error: Exception) -> bool:
        return isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(self._text) - _NEAR_END or error.msg.startswith("Unterminated string")
        )

    def _skipped(self, error: ExtractionError) -> ExtractionError:
        """Skips the item by its brackets and quotes alone, and returns `error`."""
        depth = 0
        while mark := self._next(_STRUCTURE):
            if mark == '"':
                while (mark := self._next(_IN_STRING)) == "\\":
                    if self._at >= len(self._text):
                        self._read()
                    self._at += 1
                if not mark:
                    raise ExtractionError(error.reason, f"item {self._number}: {error.detail}; a string is not closed")
            elif mark in "[{":
                depth += 1
            elif depth == 0:
                self._at -= 1
                return error
            elif mark != ",":
                depth -= 1
        raise ExtractionError(error.reason, f"item {self._number}: {error.detail}; its end was not found")

    def _mark(self) -> str:
        """Returns the next character that is not white space, without consuming it; empty at the end."""
        mark = self._next(_NO_SPACE)
        self._at -= len(mark)
        return mark

    def _next(self, pattern: re.Pattern[str]) -> str:
        """Consumes the text up to and with the next match, and returns the match; empty if there is none."""
        while (match := pattern.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._read():
                return ""
        self._at = match.end()
        return match[0]

    def _read(self, least: int = 1) -> bool:
        """Reads at least `least` more characters and drops the consumed ones; returns False at the end."""
        blocks, size = [self._text[self._at :]], 0
        while size < least and not self._is_ended:
            blocks.append(next(self._blocks, ""))
            self._is_ended = not blocks[-1]
            size += len(blocks[-1])
        self._text, self._at = "".join(blocks), 0
        return size > 0


def _found(mark: str) -> str:
    return f"there is {mark!r}" if mark else "the file ends"
