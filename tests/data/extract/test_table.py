"""CSV and TSV: dialects, headers and encodings are found, and a broken row costs that row."""

from __future__ import annotations

import csv
import io
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.data.extract import table
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused

from ..conftest import Growth


def context(**settings: Any) -> Context:
    return Context(ExtractConfig(**settings), Path("unused"), lambda content, place: iter(()))


def read(data: bytes | str, name: str = "x.csv", **settings: Any) -> list[Extracted | Refused]:
    content = Content(name, data=data.encode() if isinstance(data, str) else data)
    return list(table.extract_csv(content, context(**settings)))


def found(items: Iterable[Extracted | Refused]) -> list[tuple[str, str]]:
    """Place and text, or place and reason in brackets."""
    return [(item.place, item.text if isinstance(item, Extracted) else f"<{item.reason}>") for item in items]


def written(rows: Iterable[Iterable[object]], **options: Any) -> str:
    file = io.StringIO()
    csv.writer(file, **options).writerows(rows)
    return file.getvalue()


TEXTS = [
    "plain words here",
    'with "quotes" and, commas; and semicolons | and bars',
    "several\nlines\r\nof text\n\nand an empty one",
    "tabs\tinside and ünïcödé 中文 🐑",
]
DIALECTS = {
    "excel": {},
    "unix": {"dialect": "unix"},
    "semicolons": {"delimiter": ";"},
    "tabs": {"delimiter": "\t"},
    "bars": {"delimiter": "|"},
    "all quoted": {"quoting": csv.QUOTE_ALL},
    "escaped": {"doublequote": False, "escapechar": "\\", "quoting": csv.QUOTE_ALL},
}


@pytest.mark.parametrize("options", DIALECTS.values(), ids=DIALECTS)
def test_rows_written_in_any_dialect_come_back_exactly(options: dict[str, Any]) -> None:
    data = written([("id", "text", "n"), *((number, text, 0.5) for number, text in enumerate(TEXTS))], **options)
    assert found(read(data)) == [(f"row {number}", text) for number, text in enumerate(TEXTS, 1)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_any_text_comes_back_from_a_column_that_is_asked_for(texts: list[str]) -> None:
    data = written([("id", "note"), *enumerate(texts)], quoting=csv.QUOTE_ALL)
    expected = [text if text and not text.isspace() else "<empty>" for text in texts]
    assert [text for _, text in found(read(data, column="note"))] == expected


def test_a_file_of_another_program_is_read() -> None:
    file = io.BytesIO()
    rows = pyarrow.table({"id": [1, 2], "text": ['say "hello", world', "second\nline"], "when": [None, 3.5]})
    pyarrow.csv.write_csv(rows, file)
    assert found(read(file.getvalue())) == [("row 1", 'say "hello", world'), ("row 2", "second\nline")]


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the program sqlite3 is not installed")
def test_a_file_of_the_sqlite_program_is_read(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("CREATE TABLE notes (id INTEGER, body TEXT, score REAL)")
        connection.executemany("INSERT INTO notes VALUES (?, ?, 1.5)", list(enumerate(TEXTS)))
    connection.close()
    command = ["sqlite3", "-header", "-csv", str(tmp_path / "a.db"), "SELECT * FROM notes ORDER BY id"]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    assert [text for _, text in found(read(data))] == TEXTS


def test_a_table_of_cells_becomes_markdown() -> None:
    data = written([("name", "born", "note"), ("Ada", 1815, "a|b"), ("Alan", 1912, "two\nlines")])
    assert read(data) == [
        Extracted(
            "| name | born | note |\n| --- | --- | --- |\n| Ada | 1815 | a\\|b |\n| Alan | 1912 | two<br>lines |\n",
            "table",
        )
    ]


def test_a_long_table_is_cut_between_rows_and_every_piece_has_the_header() -> None:
    rows = [(number, f"name {number}", "é" * 10) for number in range(1, 501)]
    pieces = read(written([("id", "name", "note"), *rows]), max_document_bytes=4096)
    head = "| id | name | note |\n| --- | --- | --- |\n"
    lines = [
        line for piece in pieces if isinstance(piece, Extracted) for line in piece.text.removeprefix(head).split("\n")
    ]
    assert [line for line in lines if line] == [f"| {a} | {b} | {c} |" for a, b, c in rows]
    assert all(isinstance(piece, Extracted) and len(piece.text.encode()) <= 4096 for piece in pieces)
    first = 1
    for piece in pieces:
        word, begin, _, end = piece.place.split()
        assert (word, int(begin)) == ("rows", first)
        first = int(end) + 1
    assert first == 501


def test_a_table_without_a_header_gets_numbered_columns() -> None:
    text = read("1,Ada,1815\n2,Alan,1912\n")[0]
    assert isinstance(text, Extracted)
    assert text.text.splitlines()[0] == "| column 1 | column 2 | column 3 |"
    assert text.text.splitlines()[2:] == ["| 1 | Ada | 1815 |", "| 2 | Alan | 1912 |"]


def test_the_unnamed_first_column_that_pandas_writes_does_not_hide_the_header() -> None:
    assert found(read(",text,label\n0,some words,1\n1,more words,0\n")) == [
        ("row 1", "some words"),
        ("row 2", "more words"),
    ]


def test_a_row_with_another_number_of_columns_is_kept() -> None:
    items = read("id,text\n1,first text\n2,second,text\n3\n\n4,fourth text\n5,fifth text,,\n")
    assert found(items) == [
        ("row 1", "first text"),
        ("row 2", "second,text"),
        ("row 3", "<empty>"),
        ("row 4", "fourth text"),
        ("row 5", "fifth text"),
    ]
    assert found(read("id,text,n\n1,some, more words,2\n2,few words,3\n"))[0] == ("row 1", "some, more words")
    (table,) = found(read("a,b\n1,2\n3\n4,5,6\n7,8\n"))
    assert table == ("", "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |\n| 4 | 5 | 6 |\n| 7 | 8 |\n")


def test_a_row_that_is_too_long_for_a_template_is_refused() -> None:
    items = read("id,title,body\n1,A,words\n2,B,C,words\n3,D\n", template="{title}: {body}")
    assert found(items) == [("row 1", "A: words"), ("row 2", "<invalid>"), ("row 3", "D: ")]
    assert items[1] == Refused("row 2", "invalid", "it has 4 columns where the table has 3")


SENTENCES = ["It rained, and we stayed in.", "We read.", "Then came Ada, Alan, and Grace.", 'She said "no", twice.']


def test_commas_in_a_file_of_one_column_part_nothing() -> None:
    assert found(read("\n".join(["text", *SENTENCES * 9]) + "\n")) == [
        (f"row {number}", text) for number, text in enumerate(SENTENCES * 9, 1)
    ]
    assert read("\n".join(SENTENCES * 9) + "\n") == [Extracted("\n".join(SENTENCES * 9) + "\n")]


def test_titles_above_the_header_are_text_and_the_table_is_found() -> None:
    data = "Report of the year\n\nid,text,n\n1,first words,2\n2,second words,3\n"
    expected = [("row 1", "first words"), ("row 2", "second words")]
    assert found(read(data)) == [("line 1", "Report of the year"), *expected]
    assert found(read(data, column="text")) == [("line 1", "<invalid>"), *expected]


def test_a_wrong_column_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ExtractionError, match=r"missing: there is no column 'txt' among 'id', 'text'; did you mean 'text'\?"
    ):
        read("id,text\n1,words\n", column="txt")
    with pytest.raises(ExtractionError, match="missing"):
        read("id,text\n1,words\n", template="{id} {body}")
    assert found(read("id,title,body\n7,T,B\n", template="{title}: {body} ({id})")) == [("row 1", "T: B (7)")]


def test_a_stray_quote_costs_one_row_and_the_rest_is_read() -> None:
    rows = [f"{number},some words {number}" for number in range(1, 4001)]
    rows[1999] = '2000,"a quote that nobody closes'
    items = read("id,text\n" + "\n".join(rows) + "\n", max_document_bytes=2**14)
    assert [text for place, text in found(items) if text == "<invalid>"] == ["<invalid>"]
    assert found(items)[1999] == ("row 2000", "<invalid>")
    assert [text for _, text in found(items) if text != "<invalid>"] == [
        f"some words {n}" for n in range(1, 4001) if n != 2000
    ]


def test_a_quote_that_is_open_at_the_end_costs_one_row() -> None:
    items = read('id,text\n1,"first, words"\n2,"never closed\n3,third words\n')
    assert found(items) == [("row 1", "first, words"), ("row 2", "<invalid>"), ("row 3", "third words")]


def test_quotes_that_are_never_closed_in_every_row_end_the_file_within_bounds() -> None:
    data = "id,text\n" + '1,"first, words"\n' * 3000 + 'x","y\n' * 200_000
    items: list[Extracted | Refused] = []
    with pytest.raises(ExtractionError, match="invalid: too many quotes are never closed"):
        for item in table.extract_csv(Content("x.csv", data=data.encode()), context(max_document_bytes=2**12)):
            items.append(item)
    assert len([item for item in items if isinstance(item, Extracted)]) == 3000


def test_quotes_mean_nothing_in_a_file_where_they_part_nothing() -> None:
    data = 'id\ttitle\tyear\n1\t"Weird Al\tx\n2\tplain\ty\n3\t12" single\tz\n' + "4\tmore\tv\n" * 50
    items = read(data, "x.tsv", column="title")
    assert [text for _, text in found(items)][:4] == ['"Weird Al', "plain", '12" single', "more"]


def test_a_line_that_names_the_separator_and_spaces_after_it_are_understood() -> None:
    assert found(read("sep=;\r\nid;text\r\n1;some words\r\n")) == [("row 1", "some words")]
    assert found(read('id, text\n1, "some, words"\n2, "more, words"\n')) == [
        ("row 1", "some, words"),
        ("row 2", "more, words"),
    ]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_the_encoding_is_found(encoding: str) -> None:
    texts = [f"Où êtes-vous né, élève n° {number} ? À l'école de Orléans." for number in range(5)]
    data = written([("id", "text"), *enumerate(texts)]).encode(encoding)
    items = read(data)
    assert [text for _, text in found(items)] == texts
    expected = {"encoding": "cp1252"} if encoding == "cp1252" else {}
    assert all(isinstance(item, Extracted) and dict(item.metadata) == expected for item in items)


def test_a_row_in_another_encoding_or_with_nul_bytes_is_refused() -> None:
    good = "".join(f"{number},où êtes-vous {number}\n" for number in range(1, 5)).encode()
    data = b"id,text\n" + good + "5,où\n".encode("latin-1") + b"6,a\0b\n" + b"7,last words\n"
    assert found(read(data))[4:] == [("row 5", "<undecodable>"), ("row 6", "<binary>"), ("row 7", "last words")]


def test_line_ends_of_an_old_mac_are_understood() -> None:
    assert found(read("id,text\r1,some words\r2,more words\r")) == [("row 1", "some words"), ("row 2", "more words")]


def test_a_row_over_the_limit_is_refused_without_being_held() -> None:
    data = "id,text\n1,before it\n2," + "x" * 50_000 + "\n3,behind it\n"
    assert found(read(data, max_document_bytes=4096)) == [
        ("row 1", "before it"),
        ("row 2", "<oversized>"),
        ("row 3", "behind it"),
    ]
    cells = "a,b,c\n1,2,3\n" + "x" * 3000 + "," + "y" * 3000 + ",z\n4,5,6\n"
    assert [place for place, text in found(read(cells, max_document_bytes=4096)) if text == "<oversized>"] == ["row 2"]


@pytest.mark.parametrize("data", ["\n\n", "\r\n"])
def test_a_file_without_rows_is_empty(data: str) -> None:
    with pytest.raises(ExtractionError, match="empty"):
        read(data)


def test_a_header_without_rows_is_said_to_be_one() -> None:
    assert read("a,b,c\n") == [Refused("", "empty", "the table has no rows")]


def test_country_codes_are_cells_and_source_code_is_text() -> None:
    assert isinstance(codes := read("code,name\nDE,Germany\nFR,France\n")[0], Extracted)
    assert codes.kind == "table"
    program = "def f():\n    return 1\n"
    assert read(written([("code", "lang"), (program, "Python")])) == [Extracted(program, "code", "python", "row 1")]


def length_of_a_table(path: str) -> int:
    documents = table.extract_csv(Content("x.csv", path=Path(path)), context())
    return sum(len(item.text) for item in documents if isinstance(item, Extracted))


def test_memory_does_not_grow_with_the_file(growth: Growth, tmp_path: Path) -> None:
    for name, count in (("small", 3000), ("large", 30_000)):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text"])
            writer.writerows((number, "lorem ipsum " * 100) for number in range(count))
    length, grown = growth(length_of_a_table, tmp_path / "small", tmp_path / "large")
    assert length == 30_000 * 1200
    assert grown < 2**22


@settings(max_examples=200)
@given(st.binary(max_size=80), st.integers(0, 60))
def test_damage_of_any_kind_ends_in_a_reason(junk: bytes, at: int) -> None:
    data = b'id,text,n\n1,"some, words",2\n2,"more\nlines",3\n3,last words,4\n'
    try:
        for item in read(data[:at] + junk + data[at:]):
            assert isinstance(item, Refused) or item.text
    except ExtractionError as error:
        assert error.reason in ("invalid", "undecodable", "binary", "empty")
