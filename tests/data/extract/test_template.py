"""Records to text: templates, the fields that hold text, conversations, and all that is refused."""

from __future__ import annotations

import datetime
import decimal
import json
import string
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.config import apply_overrides, validate
from sheepop.core.errors import ConfigError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.extract.template import RecordFormat, as_text, no_column

LIMIT = 2**20
names = st.text(string.ascii_letters + string.digits + "_ -()é", max_size=8).map("n{}".format)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}\\"), max_size=20)


def made(form: RecordFormat, record: object) -> Extracted:
    document = form.document(record, "line 1", LIMIT)
    assert isinstance(document, Extracted), document
    return document


def refused(form: RecordFormat, record: object) -> Refused:
    document = form.document(record, "line 1", LIMIT)
    assert isinstance(document, Refused), document
    return document


@given(st.lists(st.tuples(words, names), min_size=1), words, st.data())
def test_a_template_gives_what_str_format_gives_for_plain_names(
    pieces: list[tuple[str, str]], tail: str, data: st.DataObject
) -> None:
    template = "".join(f"{word}{{{name}}}" for word, name in pieces) + tail
    record = {name: data.draw(words) for _, name in pieces}
    expected = template.format_map(record)
    document = RecordFormat(template=template).document(record, "", LIMIT)
    assert document.text == expected if isinstance(document, Extracted) else not expected.strip()


@pytest.mark.parametrize(
    ("template", "record", "text"),
    [
        ("{title}\n{body}", {"title": "A", "body": "B"}, "A\nB"),
        (r"{title}\n\t{body}\\n", {"title": "A", "body": "B"}, "A\n\tB\\n"),
        ("{{{a}}} {{b}}", {"a": "x"}, "{x} {b}"),
        ("{a.b.c}!", {"a": {"b": {"c": 3}}}, "3!"),
        ("{a.b}", {"a.b": "whole", "a": {"b": "part"}}, "whole"),
        ("{a}|{b}|{c}", {"a": None, "b": True, "c": [1, "é"]}, '|true|[1, "é"]'),
        ("{__class__}", {"__class__": "a field like any other"}, "a field like any other"),
        ("{x}", {"x": "{y} {{"}, "{y} {{"),
    ],
)
def test_a_template_is_filled_with_the_fields_of_the_record(template: str, record: Any, text: str) -> None:
    assert made(RecordFormat(template=template), record) == Extracted(text, "prose", "", "line 1")


@pytest.mark.parametrize(
    "template",
    ["{x.__class__.__init__}", "{x.real}", "{x.0}", "{x.y.z}"],
)
def test_a_template_reaches_into_records_only_and_never_into_objects(template: str) -> None:
    for value in (1, "text", [1], object, {"y": 1}):
        assert refused(RecordFormat(template=template), {"x": value}).reason == "missing"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{x:>1000000000}", "only {name} or {a.b}"),
        ("{x!r}", "only {name} or {a.b}"),
        ("{x[0]}", "only {name} or {a.b}"),
        ("{}", "does not name a field"),
        ("{a..b}", "does not name a field"),
        ("{a", "an unmatched"),
        ("a}", "an unmatched"),
        ("{a{b}}", "an unmatched"),
        ("words only {{x}}", "it names no field"),
    ],
)
def test_a_template_that_is_no_template_is_refused_when_the_config_is_read(template: str, why: str) -> None:
    with pytest.raises(ConfigError, match="template") as error:
        validate(ExtractConfig, {"template": template})
    assert why in str(error.value)


def test_column_and_template_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give the template alone"):
        validate(ExtractConfig, {"template": "{a}", "column": "a"})


def test_a_template_without_quotes_on_the_command_line_is_explained() -> None:
    with pytest.raises(ConfigError, match="in quotes"):
        validate(ExtractConfig, apply_overrides({}, ["template={title}"]))
    quoted = validate(ExtractConfig, apply_overrides({}, [r"template={title}\n{body}"]))
    assert made(RecordFormat.of(quoted), {"title": "A", "body": "B"}).text == "A\nB"


def test_a_missing_column_is_answered_with_those_there_are_and_the_nearest() -> None:
    problem = refused(RecordFormat(column="titel"), {"id": 1, "Title": "x"})
    assert problem.reason == "missing"
    assert problem.detail == "there is no column 'titel' among 'id', 'Title'; did you mean 'Title'?"
    many = [f"column_{number}" for number in range(1000)]
    assert no_column("x", many).endswith("and 980 more")
    assert len(no_column("x" * 10, ["y" * 10**6])) < 200


@pytest.mark.parametrize(
    ("record", "text", "kind", "language"),
    [
        ({"id": 7, "text": "some words"}, "some words", "prose", ""),
        ({"body": "second", "content": "first"}, "first", "prose", ""),
        ({"Text": "in capitals"}, "in capitals", "prose", ""),
        ({"text": "exact", "TEXT": "other"}, "exact", "prose", ""),
        ({"code": "def f():\n    pass\n", "language": "Python"}, "def f():\n    pass\n", "code", "python"),
        ({"code": "x = 1"}, "x = 1", "code", ""),
        ({"content": "int main() {}", "lang": "C++"}, "int main() {}", "code", "c++"),
        ({"content": "a: 1\n", "lang": "YAML"}, "a: 1\n", "code", "yaml"),
        ({"text": "Guten Tag", "language": "de"}, "Guten Tag", "prose", ""),
        ({"code": "DE", "name": "Germany"}, "code: DE\nname: Germany", "table", ""),
        ({"article": "4711", "price": 2.5}, "article: 4711\nprice: 2.5", "table", ""),
        ({"text": 5, "body": "words here"}, "words here", "prose", ""),
        ({"a": 1, "b": None, "c": {"d": [True]}}, 'a: 1\nb: \nc: {"d": [true]}', "table", ""),
        ("only a text", "only a text", "prose", ""),
    ],
)
def test_without_settings_the_record_decides(record: Any, text: str, kind: Any, language: str) -> None:
    assert made(RecordFormat(), record) == Extracted(text, kind, language, "line 1")


USER_AND_ASSISTANT = "user:\nHow much is 2 + 2?\n\nassistant:\n4"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "How much is 2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "How much is 2 + 2?", "response": "4"},
        {"prompt": "How much is 2 + 2?", "completion": "4", "text": "not this"},
        {"prompt": "How much is 2 + 2?", "chosen": "4", "rejected": "5"},
        {"instruction": "How much is 2 + 2?", "input": "", "output": "4"},
        {"question": "How much is 2 + 2?", "answer": "4"},
        {
            "prompt": [{"role": "user", "content": "How much is 2 + 2?"}],
            "chosen": [{"role": "user", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "4"}],
        },
        [{"role": "User", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "4"}],
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "How much is 2 + 2?"}]},
                {"role": "assistant", "content": "4"},
            ]
        },
    ],
)
def test_conversations_of_every_known_form_become_the_same_turns(record: Any) -> None:
    assert made(RecordFormat(), record) == Extracted(USER_AND_ASSISTANT, "chat", "", "line 1")


def test_turns_keep_the_system_text_pictures_and_calls_of_tools() -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        ]
    }
    expected = 'system:\nBe brief.\n\nuser:\nWhat is it?\n[image_url]\n\nassistant:\n[{"name": "look"}]'
    assert made(RecordFormat(), record).text == expected
    alpaca = {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert made(RecordFormat(), alpaca).text == "system:\nBe brief.\n\nuser:\nAdd.\n\n1 2\n\nassistant:\n3"


@pytest.mark.parametrize("messages", [[], "text", [{"role": "user"}], [{"content": "x"}], [1], {"role": "user"}, None])
def test_what_only_looks_like_a_conversation_is_a_record_like_any_other(messages: Any) -> None:
    assert made(RecordFormat(), {"messages": messages, "text": "the text"}).text == "the text"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": ""}, "empty"),
        ({"text": " \n"}, "empty"),
        ({"text": None}, "empty"),
        ({"a": None, "b": ""}, "empty"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty"),
        ({"text": "x" * (LIMIT + 1)}, "oversized"),
        ({"text": "é" * (LIMIT // 2 + 1)}, "oversized"),
        ({"text": "half \ud83d"}, "undecodable"),
        (5, "invalid"),
        (None, "invalid"),
        ([1, 2], "invalid"),
    ],
)
def test_a_record_that_gives_no_document_is_refused_with_its_reason(record: Any, reason: str) -> None:
    assert (refused(RecordFormat(), record).reason, refused(RecordFormat(), record).place) == (reason, "line 1")


def test_a_record_nested_too_deeply_for_json_is_refused() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    assert refused(RecordFormat(), {"a": nested}).reason == "invalid"


def test_values_of_a_database_are_written_as_people_write_them() -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    identity = uuid.UUID(int=5)
    assert as_text(moment) == "2024-05-06T07:08:09+00:00"
    assert as_text(datetime.date(2024, 5, 6)) == "2024-05-06"
    assert as_text(decimal.Decimal("1.50")) == "1.50"
    assert as_text(identity) == "00000000-0000-0000-0000-000000000005"
    assert as_text("é".encode()) == "é"
    assert json.loads(as_text({"when": [moment], "id": identity})) == {
        "when": ["2024-05-06T07:08:09+00:00"],
        "id": str(identity),
    }


def test_a_value_without_a_text_is_refused_rather_than_written_as_an_address_in_memory() -> None:
    assert refused(RecordFormat(column="x"), {"x": object()}).reason == "unsupported"
    assert refused(RecordFormat(column="x"), {"x": b"\xff"}).reason == "undecodable"
    assert made(RecordFormat(), {"x": b"\xff\x00", "y": 1}).text == "x: (2 bytes)\ny: 1"


def test_a_list_of_texts_in_the_column_becomes_lines_and_a_conversation_turns() -> None:
    assert made(RecordFormat(column="x"), {"x": ["one", "two"]}).text == "one\ntwo"
    turns = [{"role": "user", "content": "Hi"}]
    assert made(RecordFormat(column="x"), {"x": turns}) == Extracted("user:\nHi", "chat", "", "line 1")


def test_only_the_columns_asked_for_are_needed_and_one_that_stands_twice_is_refused() -> None:
    columns = ["id", "title", "body", "language"]
    assert RecordFormat(column="body").needed(columns) == ["body", "language"]
    assert RecordFormat(template="{body}{title.x}").needed(columns) == ["title", "body"]
    assert RecordFormat().needed(columns) == columns
    with pytest.raises(ExtractionError, match="2 columns are called 'a'"):
        RecordFormat(column="a").needed(["a", "b", "a"])
    with pytest.raises(ExtractionError, match="missing: there is no column 'c' among 'a'"):
        RecordFormat(template="{c}").needed(["a"])
