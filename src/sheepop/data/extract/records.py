"""JSON and JSON lines: records to documents, one for each, and other JSON as the text that it is."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from sheepop.data.decoding import UndecodableError, decode
from sheepop.data.extract.chat import turns_text
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, RecordError, Refused
from sheepop.data.extract.json_items import JsonItems, parse_json
from sheepop.data.extract.lines import LineError, Lines, byte_lines, open_utf8
from sheepop.data.extract.template import RecordFormat, is_chat, longest_record, no_column

_BLOCK = 2**20
# What JSON takes in memory once it is parsed, as a multiple of its text, in all but contrived files.
_PARSED_SIZE = 12
# JSON as editors write it: comments, and a comma behind the last item. Strings are matched so that they stay.
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*+")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+")|,(?=\s*+[\]}])', re.DOTALL)


def extract_jsonl(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document for each line that is a JSON record, as `RecordFormat` makes it, with the place ``line N``.

    A line that is no valid JSON, names a key twice, or is over twice the longest document is refused, and the
    next is read. A file that holds a JSON list instead is read as `extract_json` does.
    """
    config = context.config
    first, second = _first_lines(content, config)
    if first.startswith("[") and not (second and _is_json(first)):
        yield from _list_documents(content, config)
        return
    form = RecordFormat.of(config)
    is_empty = True
    for number, line in Lines(content, longest_record(config)):
        if isinstance(line, str) and line.isspace():
            continue
        is_empty = False
        place = f"line {number}"
        try:
            if isinstance(line, LineError):
                yield Refused(place, line.reason, line.detail)
            else:
                yield form.document(parse_json(line), place, longest_record(config))
        except RecordError as error:
            yield Refused(place, error.reason, error.detail)
    if is_empty:
        raise ExtractionError("empty", "it has only blank lines")


def extract_json(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document for each record of a list, with the place ``item N``; other JSON is one document of code.

    Records are also found in the lists, columns or fields of a single record when they hold the text that the
    configuration asks for, or one of the well-known fields. A list is streamed. A file with a record on every line
    is read as JSON lines.
    """
    config = context.config
    first, second = _first_lines(content, config)
    if second and first.startswith(("{", "[")) and _is_json(first):
        yield from extract_jsonl(content, context)
    elif first.startswith("["):
        yield from _list_documents(content, config)
    else:
        yield from _value_documents(content, config)


def _first_lines(content: Content, config: ExtractConfig) -> tuple[str, str]:
    """The first two lines that are not blank; of one that is too long to hold its first character."""
    lines: list[str] = []
    with open_utf8(content) as file:
        begin = file.read(_BLOCK).decode("utf-8", "replace").strip()[:1]
    with open_utf8(content) as file:
        for line in byte_lines(file, longest_record(config)):
            text = begin if line is None else line.decode("utf-8", "replace").strip()
            if text:
                lines.append(text)
            if len(lines) == 2:
                break
    return lines[0] if lines else "", lines[1] if len(lines) > 1 else ""


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except RecordError:
        return False
    return True


def _list_documents(content: Content, config: ExtractConfig) -> Iterator[Extracted | Refused]:
    form = RecordFormat.of(config)
    are_records = bool(form.names)
    try:
        for number, item in JsonItems(_text_blocks(content), longest_record(config)):
            place = f"item {number}"
            if isinstance(item, RecordError):
                yield Refused(place, item.reason, item.detail)
            elif are_records or _is_record(item):
                yield form.document(item, place, longest_record(config))
            else:
                break
            are_records = True
    except RecordError as error:
        raise ExtractionError(error.reason, error.detail) from None
    if not are_records:
        text = _whole_text(content, config)
        _parsed(text)
        yield Extracted(text, "code", "json")


def _is_record(item: object) -> bool:
    """Whether a list that begins with `item` holds documents: records, conversations, texts of several words."""
    if isinstance(item, str):
        return len(item.split(None, 1)) > 1
    return isinstance(item, Mapping) or turns_text(item) is not None


def _value_documents(content: Content, config: ExtractConfig) -> Iterator[Extracted | Refused]:
    text = _whole_text(content, config)
    value = _parsed(text)
    form = RecordFormat.of(config)
    is_empty = True
    for place, record in _records_within(value, form) if isinstance(value, dict) else ():
        is_empty = False
        yield form.document(record, place, longest_record(config))
    if not is_empty:
        return
    if form.names:
        names = tuple(value) if isinstance(value, dict) else ()
        raise ExtractionError("missing", no_column(form.names[0], names))
    yield Extracted(text, "code", "json")


def _records_within(value: dict[str, Any], form: RecordFormat) -> Iterator[tuple[str, Any]]:
    """The records that one record holds, each with its place: the rows of its columns, itself, its lists, its fields.

    Only what holds the text that `form` asks for counts.
    """
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
    """The rows of a table that is written column by column: lists of one length, or records with the same keys."""
    fields = list(value.values())
    if fields and all(isinstance(field, list) for field in fields) and len(set(map(len, fields))) == 1:
        for values in zip(*fields, strict=True):
            yield dict(zip(value, values, strict=True))
    elif fields and all(isinstance(field, dict) and field.keys() == fields[0].keys() for field in fields):
        for key in fields[0]:
            yield {name: field[key] for name, field in value.items()}


def _whole_text(content: Content, config: ExtractConfig) -> str:
    max_bytes = config.max_memory_bytes // _PARSED_SIZE
    if content.size > max_bytes:
        remedy = "a list of records or JSON lines can be of any size"
        raise ExtractionError("oversized", f"{content.size:,} bytes of one JSON value, over {max_bytes:,}; {remedy}")
    with content.open() as file:
        data = file.read()
    try:
        return decode(data).text
    except UndecodableError as error:
        raise ExtractionError(error.reason, error.detail) from None


def _parsed(text: str) -> Any:
    """The value of a JSON text, comments and last commas allowed."""
    try:
        return parse_json(text)
    except RecordError as error:
        try:
            return parse_json(_LAST_COMMA.sub(_string_only, _COMMENT.sub(_string_only, text)))
        except RecordError:
            raise ExtractionError(error.reason, error.detail) from None


def _string_only(match: re.Match[str]) -> str:
    return match[1] or ""


def _text_blocks(content: Content) -> Iterator[str]:
    with open_utf8(content) as file:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while block := file.read(_BLOCK):
                yield decoder.decode(block)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise RecordError("undecodable", f"it is not UTF-8 ({error.reason})") from None
