"""Large files are read in spans: together these give the documents of the whole file, each exactly once."""

from __future__ import annotations

import csv
import io
import json
import mailbox
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.interface import Extracted, Refused, Span

ROWS = [
    (number, f'Row {number} says that it rains; "so it is", they answer.\nÄnd more.' * (1 + number % 3))
    for number in range(300)
]
PART = 4000


def jsonl(path: Path) -> None:
    lines = [json.dumps({"text": text}) for _, text in ROWS]
    lines[17] = "{broken"
    lines[150] = ""
    path.write_text("\ufeff" + "\n".join(lines), "utf-8")


def comma_separated(path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("Reports of the weather\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["number", "text"])
        rows.writerows(ROWS[:200])
        file.write('200,"stray" quote\n\n')
        rows.writerows(ROWS[200:])


def lines_of_text(path: Path) -> None:
    path.write_text("".join(f"{text}\n\n" for _, text in ROWS), "utf-8")


def mails(path: Path) -> None:
    with closing(mailbox.mbox(path)) as box:
        for number, text in ROWS[:60]:
            head = f"From: a@example.org\nSubject: Number {number}\nDate: Mon, 6 Jun 2005 22:21:22 +0200\n\n"
            box.add(f"{head}{text}\n\nFrom here on\n".encode())


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number, text in ROWS[:80]:
            archive.writestr(f"{'.git/' * (number % 9 == 0)}{number:03d}.txt", text * 3)


def taped(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in ROWS[:80]:
            member = tarfile.TarInfo(f"{'long' * 40 * (number % 2)}{number:03d}.txt")
            member.size = len(data := text.encode())
            archive.addfile(member, io.BytesIO(data))


def lite(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE b (body TEXT)")
        connection.execute("CREATE TABLE a (id INTEGER PRIMARY KEY, text TEXT, note TEXT)")
        connection.execute("CREATE TABLE vacant (text TEXT)")
        connection.executemany("INSERT INTO a VALUES (?, ?, 'x')", [(3 * number - 50, text) for number, text in ROWS])
        connection.executemany("INSERT INTO b VALUES (?)", [(text,) for _, text in ROWS[:40]])
        connection.commit()


def duck(path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    with closing(duckdb.connect(str(path))) as connection:
        connection.execute("CREATE TABLE a (number INTEGER, text VARCHAR)")
        connection.begin()
        connection.executemany("INSERT INTO a VALUES (?, ?)", ROWS)
        connection.commit()
        connection.execute("DELETE FROM a WHERE number % 10 = 3")


def parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    numbers, texts = zip(*ROWS, strict=True)
    files.write_table(
        pyarrow.table({"number": numbers, "text": texts}),
        path,
        row_group_size=25,
        compression="none",
        use_dictionary=False,
    )


FILES: dict[str, Callable[[Path], None]] = {
    "rows.jsonl": jsonl,
    "lines.json": jsonl,
    "rows.csv": comma_separated,
    "text.txt": lines_of_text,
    "mails.mbox": mails,
    "members.zip": zipped,
    "members.tar": taped,
    "rows.sqlite": lite,
    "rows.duckdb": duck,
    "rows.parquet": parquet,
}


@pytest.fixture(scope="module")
def extraction() -> Iterator[Extraction]:
    with closing(Extraction(ExtractConfig(max_document_bytes=3000))) as extraction:
        yield extraction


@pytest.mark.parametrize("name", FILES)
def test_spans_give_the_documents_of_the_file(name: str, extraction: Extraction, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[name](path)
    whole = list(extraction.documents(path, name))
    spans = extraction.spans(path, name, path.stat().st_size // 6)
    assert len(spans) > 3
    assert [span.number for span in spans] == list(range(len(spans)))
    assert sum(span.size for span in spans) == pytest.approx(path.stat().st_size, abs=len(spans) + 3, rel=0.15)
    assert [item for span in spans for item in extraction.documents(path, name, span)] == whole


def test_the_last_lines_of_a_csv_file_come_from_its_last_span(extraction: Extraction, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    comma_separated(path)
    *_, last = extraction.spans(path, path.name, PART)
    *_, item = extraction.documents(path, path.name, last)
    # Two rows of a line each are above the last hundred: a refused one, and an empty one that is no row.
    assert isinstance(item, Extracted) and (item.place, item.text) == ("row 301", ROWS[-1][1])


def test_a_table_of_numbers_is_cut_only_if_it_is_longer_than_a_document(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("a,b\n" + "".join(f"{number},{number * number}\n" for number in range(2000)))
    with closing(Extraction(ExtractConfig(), tmp_path)) as extraction:
        assert extraction.spans(path, path.name, PART) == []
    with closing(Extraction(ExtractConfig(max_document_bytes=8000), tmp_path)) as extraction:
        spans = extraction.spans(path, path.name, PART)
        texts = [item for span in spans for item in extraction.documents(path, path.name, span)]
        rows = [line for item in texts if isinstance(item, Extracted) for line in item.text.splitlines()[2:]]
    assert rows == [f"| {number} | {number * number} |" for number in range(2000)]
    assert isinstance(texts[0], Extracted) and texts[0].place.startswith("rows 1 to ")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("\n".join('{"text": "some words"}' for _ in range(2000)).encode("utf-16"), id="UTF-16"),
        pytest.param(b'{"text": "some words"}\r' * 2000, id="CR"),
        pytest.param(b"[" + b'{"text": "some words"},\n' * 2000 + b'{"text": "end"}]', id="a list"),
    ],
)
def test_what_cannot_be_cut_at_line_ends_is_read_whole(data: bytes, extraction: Extraction, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    assert extraction.spans(path, path.name, PART) == []


def test_a_damaged_archive_is_read_whole_and_refused(extraction: Extraction, tmp_path: Path) -> None:
    path = tmp_path / "members.zip"
    zipped(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert extraction.spans(path, path.name, PART) == []
    (refused,) = extraction.documents(path, path.name)
    assert isinstance(refused, Refused) and refused.reason == "damaged"


def test_the_pages_of_a_long_pdf_are_spans_of_two_hundred(tmp_path: Path) -> None:
    canvas = pytest.importorskip("reportlab.pdfgen.canvas")
    path = tmp_path / "long.pdf"
    page = canvas.Canvas(str(path))
    for number in range(450):
        page.drawString(72, 720, f"This is the text of page number {number + 1}.")
        page.showPage()
    page.save()
    with closing(Extraction(ExtractConfig(), tmp_path)) as extraction:
        spans = extraction.spans(path, path.name, path.stat().st_size // 100)
        assert [(span.begin, span.end) for span in spans] == [(0, 200), (200, 400), (400, 450)]
        items = [item for span in spans for item in extraction.documents(path, path.name, span)]
    assert [item.place for item in items] == ["pages 1 to 200", "pages 201 to 400", "pages 401 to 450"]
    assert all(isinstance(item, Extracted) and item.metadata["pages"] == "450" for item in items)
    assert isinstance(items[2], Extracted) and items[2].marks[0] == (0, "page 401")


def test_places_name_where_a_span_is() -> None:
    span = Span(3, 100, 2_100, 10, 2_000)
    assert span.place == "bytes 101 to 2,100"
    assert replace(Refused(span.place, "timeout", "")).place == span.place
    assert Span(0, 5, 9, 5, 1, "rowids", "notes").place == "table notes rowids 6 to 9"
