"""JSON lines and JSON: every record one document, every broken one refused in its place, whatever the size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.data.extract import records
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.records import JsonItems

from ..conftest import Growth

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def context(**settings: Any) -> Context:
    return Context(ExtractConfig(**settings), Path("unused"), lambda content, place: iter(()))


def read(data: bytes, name: str = "x.jsonl", **settings: Any) -> list[Extracted | Refused]:
    extract = records.extract_jsonl if name.endswith("l") else records.extract_json
    return list(extract(Content(name, data=data), context(**settings)))


def found(items: Iterable[Extracted | Refused]) -> list[tuple[str, str]]:
    """Place and text, or place and reason in brackets."""
    return [(item.place, item.text if isinstance(item, Extracted) else f"<{item.reason}>") for item in items]


def lines(*records: object) -> bytes:
    return b"\n".join(orjson.dumps(record) for record in records)


# JSON lines


@given(st.lists(st.text().filter(lambda text: text.strip()), min_size=1))
def test_every_line_is_one_document_with_exactly_its_text(texts: list[str]) -> None:
    data = lines(*({"n": number, "text": text} for number, text in enumerate(texts)))
    assert found(read(data)) == [(f"line {number}", text) for number, text in enumerate(texts, 1)]


def test_an_invalid_line_is_refused_in_its_place_and_the_others_go_on() -> None:
    data = lines({"text": "a"}, {"text": "b"}) + b'\n{"text": "c"\n' + lines({"text": "d"})
    items = read(data)
    assert found(items) == [("line 1", "a"), ("line 2", "b"), ("line 3", "<invalid>"), ("line 4", "d")]
    assert items[2] == Refused("line 3", "invalid", "Expecting ',' delimiter, character 14")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a", "text": "b"}', "invalid"),
        (b'{"text": "a", "meta": {"x": 1, "x": 1}}', "invalid"),
        (b'{"text": "a\0b"}', "invalid"),
        (b"\0\0\0", "invalid"),
        (b'{"text": "a"} {"text": "b"}', "invalid"),
        (b"[1, 2]", "invalid"),
        (b"17", "invalid"),
        (b'{"text": "half \\ud83d"}', "undecodable"),
        (b'{"text": "\xff"}', "undecodable"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid"),
        (b'{"text": ' + b'{"a":' * 100_000 + b"}" * 100_000 + b"}", "invalid"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "' + b"\\u0041" * 600 + b"x" * 3000 + b'"}', "oversized"),
        (b'{"text": "x", "more": "' + b"x" * 300_000 + b'"}', "oversized"),
    ],
)
def test_a_bad_line_costs_that_line_only(line: bytes, reason: str) -> None:
    good = lines({"text": "é before"}), lines({"text": "after"})
    expected = [("line 1", "é before"), ("line 2", f"<{reason}>"), ("line 3", "after")]
    small = {"max_document_bytes": 2000} if reason == "oversized" else {}
    assert found(read(b"\n".join([good[0], line, good[1]]), **small)) == expected


def test_byte_order_marks_windows_line_ends_blank_lines_and_nan_do_no_harm() -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b", "x": NaN}\r\n'
    assert found(read(data)) == [("line 1", "a"), ("line 4", "b")]
    for encoding in ("utf-16", "utf-32", "utf-16-be"):
        mark = "\ufeff" if encoding.endswith("be") else ""
        wide = (mark + '{"text": "à"}\n{"text": "中文"}\n').encode(encoding)
        assert found(read(wide)) == [("line 1", "à"), ("line 2", "中文")]


def test_a_file_in_another_encoding_is_read_in_it_but_one_line_of_it_among_utf_8_is_refused() -> None:
    french = [f'{{"text": "Élève numéro {n} à l\'école, où êtes-vous né ?"}}'.encode("latin-1") for n in range(9)]
    texts = [text for _, text in found(read(b"\n".join([b'{"text": "ascii"}', *french])))]
    assert texts[:2] == ["ascii", "Élève numéro 0 à l'école, où êtes-vous né ?"]
    mixed = [line.decode("latin-1").encode() for line in french[:4]] + [french[4]]
    assert [text for _, text in found(read(b"\n".join(mixed)))][4] == "<undecodable>"


def test_broken_utf_16_ends_the_file_with_a_reason() -> None:
    with pytest.raises(ExtractionError, match="undecodable: it is not valid utf_16_le"):
        read('\ufeff{"text": "a"}\n'.encode("utf-16-le") + b"\x00\xd8\x00")


def test_line_7_of_a_million_that_is_invalid_is_the_only_one_refused() -> None:
    data = b'{"text":"some words"}\n' * 6 + b'{"text":\n' + b'{"text":"some words"}\n' * 99_993
    count = {Extracted: 0, Refused: 0}
    for item in records.extract_jsonl(Content("x.jsonl", data=data), context()):
        count[type(item)] += 1
        assert item.place == "line 7" or isinstance(item, Extracted)
    assert count == {Extracted: 99_999, Refused: 1}


def found_beside_a_long_line(path: str) -> list[tuple[str, str]]:
    return found(records.extract_jsonl(Content("x.jsonl", path=Path(path)), context(max_document_bytes=2**20)))


def test_a_line_of_two_gigabytes_is_passed_over_without_being_held(growth: Growth, tmp_path: Path) -> None:
    for name, size in (("small", 2**22), ("huge", 2**31)):
        with (tmp_path / name).open("wb") as file:
            file.write(b'{"text": "before"}\n{"text": "')
            file.seek(size, 1)
            file.write(b'"}\n{"text": "after"}\n')
    items, grown = growth(found_beside_a_long_line, tmp_path / "small", tmp_path / "huge")
    assert items == [["line 1", "before"], ["line 2", "<oversized>"], ["line 3", "after"]]
    assert grown < 2**22


def test_a_file_of_blank_lines_is_empty() -> None:
    with pytest.raises(ExtractionError, match="empty"):
        read(b"\n \n\n")


def test_column_and_template_are_honoured_line_by_line() -> None:
    data = lines({"t": "A", "m": {"x": 1}}, {"m": {"x": 2}})
    assert found(read(data, template="{t}/{m.x}")) == [("line 1", "A/1"), ("line 2", "<missing>")]
    assert found(read(data, column="m.x")) == [("line 1", "1"), ("line 2", "2")]


# Lists


def chunks(text: str, size: int) -> Iterable[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


@settings(max_examples=200)
@given(st.lists(values, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]))
def test_items_of_a_list_are_those_that_a_parser_of_the_whole_finds(
    expected: list[Any], size: int, indent: int | None
) -> None:
    text = json.dumps(expected, indent=indent)
    items = list(JsonItems(iter(chunks(text, size)), 10**6))
    assert items == list(enumerate(orjson.loads(text.encode()), 1))


@pytest.mark.parametrize(
    "bad", ['{"a": tru}', '{"a" 1}', "{'a': 1}", '{"a": 1, "a": 2}', "[1, 2,, [3]]", '"a\nb"', "nul"]
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_bad_item_is_passed_over_by_its_brackets_and_the_others_are_read(bad: str, size: int) -> None:
    text = f'[{{"a": "]}}"}}, {bad}, {{"b": [1, "\\"]"]}}]'
    first, second, third = JsonItems(iter(chunks(text, size)), 10**6)
    assert (first, third) == ((1, {"a": "]}"}), (3, {"b": [1, '"]']}))
    assert isinstance(second[1], ExtractionError)
    assert second[1].reason == "invalid"


def test_an_item_over_the_limit_is_passed_over() -> None:
    long = json.dumps({"text": 'x"]},\\' * 1000})
    items = list(JsonItems(iter(chunks(f'[{long}, {{"a": 1}}, {long}]', 100)), 2000))
    assert [item if isinstance(item, dict) else item.reason for _, item in items] == [
        "oversized",
        {"a": 1},
        "oversized",
    ]


@pytest.mark.parametrize(
    ("text", "why", "before"),
    [
        ('[{"a": 1}, {"a": ', "item 2: Expecting value", 1),
        ('[{"a": 1}', "after item 1, the file ends", 1),
        ('[{"a": 1},', "the list ends before item 2", 1),
        ('[{"a": 1} {"a": 2}]', "after item 1, there is '{'", 1),
        ('[{"a": 1}] {"a": 2}', "after the list, there is '{'", 1),
        ('[{"a": 1}, {"a": "x', "a string is not closed", 1),
        ("[" * 100_000, "nested too deeply", 0),
    ],
)
def test_a_list_that_breaks_gives_what_stands_before_and_says_where(text: str, why: str, before: int) -> None:
    items: list[Any] = []
    with pytest.raises(ExtractionError, match="invalid") as error:
        for item in records.extract_json(Content("x.json", data=text.encode()), context()):
            items.append(item)
    assert why in error.value.detail
    assert len(items) == before


def length_of_a_list(path: str) -> int:
    items = records.extract_json(Content("x.json", path=Path(path)), context())
    return sum(len(item.text) for item in items if isinstance(item, Extracted))


def test_a_list_larger_than_memory_allows_is_streamed(growth: Growth, tmp_path: Path) -> None:
    record = json.dumps({"text": "lorem ipsum " * 1000}, indent=2)
    for name, count in (("small", 400), ("large", 4000)):
        (tmp_path / name).write_text("[\n" + ",\n".join([record] * count) + "\n]\n")
    length, grown = growth(length_of_a_list, tmp_path / "small", tmp_path / "large")
    assert length == 4000 * 12_000
    assert grown < 2**22


@pytest.mark.parametrize("opening", ["", "\ufeff", "\n\n  "])
def test_a_list_of_records_texts_or_conversations_is_one_document_for_each(opening: str) -> None:
    records_, texts = [{"text": "a"}, {"text": "b"}], ["some words", "one"]
    turns = [{"role": "user", "content": "Hi"}]
    for value, expected in [(records_, ["a", "b"]), (texts, texts), ([turns, turns], ["user:\nHi"] * 2)]:
        data = (opening + json.dumps(value)).encode()
        assert found(read(data, "x.json")) == [("item 1", expected[0]), ("item 2", expected[1])]


@pytest.mark.parametrize(
    "value", [[1, 2], ["a", "b"], [], [[1, 2], [3]], {}, {"name": "x", "version": "1.0"}, "text", 5]
)
def test_other_json_is_one_document_of_code_exactly_as_it_stands(value: Any) -> None:
    text = json.dumps(value, indent=4) + "\n"
    assert read(text.encode(), "x.json") == [Extracted(text, "code", "json")]


def test_json_with_comments_and_last_commas_is_taken_as_it_stands() -> None:
    text = '{\n  // a comment with a "quote"\n  "a": "// no comment, ]",  /* one\n more */\n  "b": [1, 2,],\n}\n'
    assert read(text.encode(), "tsconfig.json") == [Extracted(text, "code", "json")]
    with pytest.raises(ExtractionError, match="invalid"):
        read(b'{"a": 1,, "b": 2}', "x.json")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}, [("data item 1", "a"), ("data item 2", "b")]),
        ({"a": {"text": "x"}, "b": {"text": "y"}}, [("item a", "x"), ("item b", "y")]),
        ({"text": ["x", "y"], "label": [0, 1]}, [("row 1", "x"), ("row 2", "y")]),
        ({"text": {"0": "x", "1": "y"}, "label": {"0": 0, "1": 1}}, [("row 1", "x"), ("row 2", "y")]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, [("", "user:\nHi")]),
    ],
)
def test_records_are_found_inside_a_record(value: Any, expected: list[tuple[str, str]]) -> None:
    assert found(read(json.dumps(value, indent=1).encode(), "x.json")) == expected


def test_a_column_that_is_asked_for_is_looked_for_in_a_record_too() -> None:
    value = {"meta": 1, "rows": [{"note": "a"}, {"note": "b"}]}
    data = json.dumps(value).encode()
    assert found(read(data, "x.json", column="note")) == [("rows item 1", "a"), ("rows item 2", "b")]
    assert found(read(b'{"note": "whole"}', "x.json", column="note")) == [("", "whole")]
    with pytest.raises(ExtractionError, match="missing: there is no column 'nope' among 'meta', 'rows'"):
        read(data, "x.json", column="nope")
    assert found(read(b"[1, 2]", "x.json", column="note")) == [("item 1", "<invalid>"), ("item 2", "<invalid>")]


def test_lines_in_a_json_file_and_a_list_in_a_jsonl_file_are_recognised() -> None:
    assert found(read(lines({"text": "a"}, {"text": "b"}), "x.json")) == [("line 1", "a"), ("line 2", "b")]
    assert found(read(lines([{"text": "a"}, {"text": "b"}]), "x.jsonl")) == [("item 1", "a"), ("item 2", "b")]
    pretty = json.dumps([{"text": "a"}], indent=2).encode()
    assert found(read(pretty, "x.jsonl")) == [("item 1", "a")]
    turns = [{"role": "user", "content": "Hi"}]
    assert found(read(lines(turns, turns), "x.jsonl")) == [("line 1", "user:\nHi"), ("line 2", "user:\nHi")]


def test_one_value_that_is_too_large_is_refused_with_a_remedy() -> None:
    with pytest.raises(ExtractionError, match=r"oversized: .* can be of any size"):
        read(b'{"a": "' + b"x" * 2**25 + b'"}', "x.json", max_memory_bytes=2**28)


@settings(max_examples=150)
@given(st.binary(max_size=60), st.integers(0, 200), st.sampled_from(["x.json", "x.jsonl"]), st.booleans())
def test_damage_of_any_kind_ends_in_a_reason(junk: bytes, at: int, name: str, is_list: bool) -> None:
    rows = [{"text": "some words", "n": [1, {"a": None}]}] * 4
    good = json.dumps(rows).encode() if is_list else lines(*rows)
    data = good[:at] + junk + good[at:]
    try:
        for item in read(data, name):
            assert isinstance(item, Refused) or item.text
    except ExtractionError as error:
        assert error.reason in ("invalid", "undecodable", "binary", "empty")
