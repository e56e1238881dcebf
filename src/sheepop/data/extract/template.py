"""Makes the text of a document from a record of a table, a database or a JSON file, which may be a conversation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from sheepop.core.errors import first_few
from sheepop.data.extract.config import ExtractConfig, parse_template
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.extract.languages import LANGUAGES

TEXT_FIELDS = (
    *("text", "content", "body", "markdown", "code", "raw_content", "article", "document", "passage", "story"),
    *("review", "review_text", "review_body", "transcript", "sentence"),
)
"""Fields that usually contain the text of a record, the most likely first; letter case does not matter."""

_TURN_FIELDS = ("messages", "conversations", "conversation")
_ANSWERS = ("response", "completion", "chosen")
_PAIRS = (("instruction", "output"), ("question", "answer"))
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}

PAIR: Final = "pair"
"""The kind of a document that consists of a source and a target, with a mark at the beginning of each; never cut."""
SOURCE, TARGET = "source", "target"
CODE_FIELDS = frozenset({"code", "source_code", "func_code_string", "whole_func_string"})
LANGUAGE_FIELDS = ("programming_language", "language", "lang")
# Language names that differ from those of `sheepop.data.extract.languages`.
_SAME_LANGUAGES = {"bash": "shell", "cpp": "c++", "csharp": "c#", "lisp": "common lisp", "html": "html"}
# In tables these are often a country code, a number of stars or a kind of article: they count if a value has two words.
_NEEDS_WORDS = frozenset({"code", "article", "document", "story", "review", "passage", "sentence"})
_KINDS = {bool: "a truth value", int: "a number", float: "a number", type(None): "null", list: "a list", str: "text"}
_MOST_NAMES, _MOST_LETTERS = 20, 60
_MISSING = object()
_ABOUT_PAIRS = (
    "it is a pair of source and target, which is for model.architecture=encoder_decoder; for a decoder, set "
    "data.extract.template to make one text of it, such as '{source} {target}'"
)


@dataclass(frozen=True)
class RecordFormat:
    """How a record becomes text: the field `column`, the `template` filled in, or a `pair` of two fields, see `PAIR`.

    Without these, a conversation becomes its turns (see `chat_text`), a record with one of `TEXT_FIELDS` that text, and
    any other record one line ``name: value`` for each field. A name with dots means a field inside nested records,
    unless a field has exactly that name.
    """

    column: str | None = None
    template: str | None = None
    pair: tuple[str, str] | None = None

    @classmethod
    def of(cls, config: ExtractConfig) -> RecordFormat:
        """Returns the configured format."""
        return cls(config.column, config.template, config.pair)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The configured fields, in the order of the template; empty if the text is chosen by the record."""
        if self.template is not None:
            return tuple(dict.fromkeys(name for _, name in parse_template(self.template) if name is not None))
        return self.pair or (() if self.column is None else (self.column,))

    def document(self, record: object, place: str, max_bytes: int) -> Extracted | Refused:
        """Returns the document of `record`, or a refusal, for example if its text is over `max_bytes` of UTF-8."""
        try:
            made = self._made(record, place)
            size = len(made.text.encode("utf-8"))
        except ExtractionError as error:
            return Refused(place, error.reason, error.detail)
        except UnicodeEncodeError as error:
            return Refused(place, "undecodable", f"{error.object[error.start]!r} is half of a surrogate pair")
        except RecursionError:
            return Refused(place, "invalid", "it is nested too deeply")
        # A pair cannot be cut later.
        if made.marks and size > max_bytes // 2:
            return Refused(place, "oversized", f"{size:,} bytes, over data.extract.max_document_bytes")
        if size > max_bytes:
            return Refused(place, "oversized", f"{size:,} bytes, over {max_bytes:,}, twice the longest document")
        if not made.text or made.text.isspace():
            return Refused(place, "empty", "its text is empty")
        return made

    def needed(self, columns: Sequence[str]) -> list[str]:
        """Returns the `columns` to read; raises `ExtractionError` if a configured one is missing or occurs twice."""
        if not self.names:
            return list(columns)
        kept = set(LANGUAGE_FIELDS if self.column is not None else ())
        for name in self.names:
            top = name if name in columns else name.partition(".")[0]
            if top not in columns:
                raise ExtractionError("missing", no_column(name, columns))
            if columns.count(top) > 1:
                raise ExtractionError("invalid", f"{columns.count(top)} columns are called {top!r}")
            kept.add(top)
        return [column for column in columns if column in kept]

    def for_table(self, columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> RecordFormat | None:
        """Returns the format for the rows of a table, judged by its first rows, or None if no column has text."""
        chosen = self
        if not self.names and not any(map(is_chat, sample)):
            chosen = RecordFormat(text_field(columns, sample))
            if chosen.column is None:
                return None
        chosen.needed(columns)
        return chosen

    def holds_text(self, record: object) -> bool:
        """Returns whether `record` has the configured fields, or without these a conversation or a text field."""
        if not isinstance(record, Mapping):
            return False
        if self.names:
            return all(_lookup(record, name) is not _MISSING for name in self.names)
        return is_chat(record) or text_field(record, (record,)) is not None

    def _made(self, record: object, place: str) -> Extracted:
        if not isinstance(record, Mapping):
            if isinstance(record, str) and not self.names:
                return Extracted(record, place=place)
            if not self.names and (chat := turns_text(record)) is not None:
                return Extracted(chat, "chat", "", place)
            raise ExtractionError("invalid", f"it is {_kind_of(record)}, not a record with named fields")
        if self.pair is not None:
            return _pair_document(record, self.pair, place)
        if self.template is not None:
            pieces = parse_template(self.template)
            text = "".join(words if name is None else words + as_text(_value(record, name)) for words, name in pieces)
            return Extracted(text, place=place)
        if self.column is not None:
            return _field_document(record, self.column, _value(record, self.column), place)
        try:
            chat = chat_text(record)
        except (TypeError, ValueError) as error:
            raise ExtractionError("invalid", f"its turns are not text ({error})") from None
        if chat is not None:
            return Extracted(chat, "chat", "", place)
        field = text_field(record, (record,))
        if field is not None:
            return _field_document(record, field, record[field], place)
        if record.keys() == {SOURCE, TARGET} and all(isinstance(value, str) for value in record.values()):
            raise ExtractionError("pair", _ABOUT_PAIRS)
        values = [(name, cell_text(value)) for name, value in record.items()]
        lines = [f"{name}: {value}" for name, value in values] if any(value for _, value in values) else []
        return Extracted("\n".join(lines), "table", "", place)


def longest_record(config: ExtractConfig) -> int:
    """Returns the most bytes of a record in its file, and of its text: twice those of the longest document.

    A text longer than a document is cut later. Escapes may make a record twice as long as its text.
    """
    return 2 * config.max_document_bytes


def is_chat(record: Mapping[str, Any]) -> bool:
    """Returns whether a record is a conversation."""
    try:
        return chat_text(record) is not None
    except (TypeError, ValueError):
        return True


def text_field(columns: Iterable[str], sample: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the first of `TEXT_FIELDS` among the columns whose values in `sample` are text, or None."""
    known = {column.lower(): column for column in reversed([*columns])}
    for name in TEXT_FIELDS:
        if name in known:
            values = [value for row in sample if (value := row.get(known[name])) is not None]
            is_text = all(isinstance(value, str | bytes) for value in values)
            if is_text and (name not in _NEEDS_WORDS or any(len(value.split(None, 1)) > 1 for value in values)):
                return known[name]
    return None


def as_text(value: object) -> str:
    """Returns a value as text, null as "", lists and records as JSON; raises `ExtractionError` if it has no text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            raise ExtractionError("undecodable", f"{len(value):,} bytes that are not UTF-8") from None
    if isinstance(value, bool | int | float | Mapping | list | tuple):
        try:
            return json.dumps(value, ensure_ascii=False, default=as_text)
        except (TypeError, ValueError) as error:
            raise ExtractionError("invalid", f"a value cannot be written as text ({error})") from None
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        raise ExtractionError("unsupported", f"a value of type {type(value).__name__} has no text")
    return str(value)


def cell_text(value: object) -> str:
    """Returns a value as text for a table cell or ``name: value`` line; bytes that are not text become their number."""
    if not isinstance(value, bytes | bytearray | memoryview):
        return as_text(value)
    text = bytes(value).decode("utf-8", "replace")
    is_text = "\0" not in text and text.encode("utf-8") == value
    return text if is_text else f"({len(value):,} bytes)"


def no_column(name: str, columns: Sequence[str]) -> str:
    """Returns the message for a missing column, with the existing columns and the most similar one."""
    if not columns:
        return f"there is no column {name!r}"
    named = first_few(columns, _MOST_NAMES, written=lambda column: repr(column[:_MOST_LETTERS]))
    return f"there is no column {name!r} among {named}{_meant(name, tuple(columns[:_MOST_NAMES]))}"


# Cached, because each record of a file may lack the column.
@lru_cache(maxsize=64)
def _meant(name: str, columns: tuple[str, ...]) -> str:
    """Returns the question for the most similar column, or an empty string if none is similar."""
    folded = {column[:_MOST_LETTERS].lower(): column[:_MOST_LETTERS] for column in columns}
    near = difflib.get_close_matches(name.lower()[:_MOST_LETTERS], list(folded), n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def _value(record: Mapping[str, Any], name: str) -> Any:
    value = _lookup(record, name)
    if value is _MISSING:
        raise ExtractionError("missing", no_column(name, tuple(record)))
    return value


def _lookup(record: Mapping[str, Any], name: str) -> Any:
    """Returns the value of the field `name`, or of the nested field that its dots name, or `_MISSING`."""
    value: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _field_document(record: Mapping[str, Any], name: str, value: object, place: str) -> Extracted:
    if not isinstance(value, str) and (chat := turns_text(value)) is not None:
        return Extracted(chat, "chat", "", place)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        value = "\n".join(value)
    text = as_text(value)
    for field in LANGUAGE_FIELDS:
        language = record.get(field)
        named = _SAME_LANGUAGES.get(language.lower(), language.lower()) if isinstance(language, str) else ""
        if named in LANGUAGES or named in _SAME_LANGUAGES:
            return Extracted(text, "code", named, place)
    return Extracted(text, "code" if name.lower() in CODE_FIELDS else "prose", "", place)


def _pair_document(record: Mapping[str, Any], names: tuple[str, str], place: str) -> Extracted:
    source, target = values = [_value(record, name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise ExtractionError("invalid", f"its field {name!r} is {_kind_of(value)}, but a pair needs two texts")
        if not value or value.isspace():
            raise ExtractionError("empty", f"its field {name!r} is empty")
    return Extracted(source + target, PAIR, "", place, ((0, SOURCE), (len(source), TARGET)))


def sides(text: str, marks: tuple[tuple[int, str], ...]) -> tuple[str, str] | None:
    """Returns the source and the target in the text of a pair, or None if the marks are not those of a pair."""
    if tuple(name for _, name in marks) != (SOURCE, TARGET):
        return None
    return text[: marks[1][0]], text[marks[1][0] :]


def _kind_of(value: object) -> str:
    return _KINDS.get(type(value), "a record" if isinstance(value, Mapping) else f"a {type(value).__name__}")


def chat_text(record: Mapping[str, Any]) -> str | None:
    """Returns the conversation in `record` as text, or None if it has no known form.

    Known forms are turns in one of `_TURN_FIELDS`; ``prompt`` with one of `_ANSWERS` (a rejected answer is left out);
    ``instruction`` with ``output`` and perhaps ``input``; ``question`` with ``answer``. A ``system`` text comes first.
    """
    for field in _TURN_FIELDS:
        if field in record and (text := turns_text(record[field])) is not None:
            return text
    turns = _pair(record)
    if turns is None:
        return None
    system = record.get("system")
    return _joined([("system", system), *turns] if isinstance(system, str) and system else turns)


def turns_text(turns: object) -> str | None:
    """Returns a list of ``{role, content}`` or ``{from, value}`` records as text, or None if it is something else."""
    known = _turns(turns)
    return None if known is None else _joined(known)


def _pair(record: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    if record.get("prompt") is not None:
        prompt = _turns(record["prompt"], "user")
        answer = _turns(next((record[field] for field in _ANSWERS if field in record), None), "assistant")
        if prompt is None or answer is None:
            return None
        # Preference data often repeats the whole conversation in the answer.
        return answer if answer[: len(prompt)] == prompt else prompt + answer
    if "rejected" in record and "chosen" in record:
        return _turns(record["chosen"])
    for question_field, answer_field in _PAIRS:
        texts: list[Any] = [record.get(question_field), record.get(answer_field)]
        if all(isinstance(text, str) for text in texts):
            more = record.get("input")
            if question_field == "instruction" and isinstance(more, str) and more:
                texts[0] = f"{texts[0]}\n\n{more}"
            return list(zip(("user", "assistant"), texts, strict=True))
    return None


def _turns(value: object, speaker: str = "") -> list[tuple[str, str]] | None:
    """Returns the turns of a list of records; a string is one turn of the `speaker`, if one is given."""
    if isinstance(value, str) and speaker:
        return [(speaker, value)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return None
    known = [turn for turn in map(_turn, value) if turn is not None]
    return known if len(known) == len(value) else None


def _turn(turn: object) -> tuple[str, str] | None:
    if not isinstance(turn, Mapping):
        return None
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or not ("content" in turn or "value" in turn or "tool_calls" in turn):
        return None
    content = turn["content"] if "content" in turn else turn.get("value")
    parts = [part for part in (_content_text(content), _as_json(turn.get("tool_calls"))) if part]
    return _ROLES.get(role.lower(), role.lower()), "\n".join(parts)


def _content_text(content: object) -> str:
    """Returns the text of a turn; for a list of parts their texts, and the type in brackets of other parts."""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return content if isinstance(content, str) else _as_json(content)


def _part(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"[{part.get('type', 'part')}]" if isinstance(part, Mapping) else _content_text(part)


def _as_json(value: object) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _joined(turns: Sequence[tuple[str, str]]) -> str:
    """Returns each turn as a line with the role and a colon, followed by its text; an empty line separates turns."""
    if not any(text for _, text in turns):
        return ""
    return "\n\n".join(f"{role}:\n{text}" for role, text in turns)
