from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import duckdb
import openpyxl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from docx import Document
from hypothesis import given
from hypothesis import strategies as st
from magika import Magika
from mkepub import Book
from PIL import Image
from pptx import Presentation
from reportlab.pdfgen.canvas import Canvas
from warcio.warcwriter import WARCWriter

from sheepop.data.extract import detection
from sheepop.data.extract.detection import HEAD_BYTES, FileType, detect
from sheepop.data.extract.dispatch import FORMATS
from sheepop.data.extract.interface import Content, ExtractionError

# Two of the libraries leave temporary files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:(Unclosed file|Implicitly cleaning up):ResourceWarning")

PROSE = b"The sheep went up the hill, and the other sheep followed.\n" * 20


def of(data: bytes, name: str = "file") -> FileType:
    return detect(Content(name, data=data))


def refusal(data: bytes, name: str = "file") -> tuple[str, str]:
    with pytest.raises(ExtractionError) as caught:
        of(data, name)
    return caught.value.reason, caught.value.detail


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def image(kind: str) -> bytes:
    return saved(lambda buffer: Image.new("RGB", (40, 30), "navy").save(buffer, kind))


def pdf() -> bytes:
    buffer = io.BytesIO()
    canvas = Canvas(buffer)
    canvas.drawString(100, 700, "Hello")
    canvas.save()
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("word/a.txt", "no office file")
    return buffer.getvalue()


def tar(kind: int = tarfile.PAX_FORMAT, member: bytes = PROSE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as file:
        info = tarfile.TarInfo("a.txt")
        info.size = len(member)
        file.addfile(info, io.BytesIO(member))
    return buffer.getvalue()


def warc(compressed: bool) -> bytes:
    buffer = io.BytesIO()
    writer = WARCWriter(buffer, gzip=compressed)
    writer.write_record(writer.create_warc_record("http://a.example/", "resource", payload=io.BytesIO(PROSE)))
    return buffer.getvalue()


def database(tmp_path: Path, make: Callable[[str], object]) -> bytes:
    path = tmp_path / make.__name__
    make(str(path))
    return path.read_bytes()


def sqlite(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table t (a text)")
    connection.commit()
    connection.close()


def duck(path: str) -> None:
    with duckdb.connect(path) as connection:
        connection.execute("create table t (a text)")


def epub(path: str) -> None:
    book = Book("Sheep")
    book.add_page("One", "<p>Baa.</p>")
    book.save(path)


def arrow(stream: bool) -> bytes:
    table = pa.table({"text": ["a", "b"]})
    buffer = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, str]]:
    """Files that other libraries made: what they are, and as what they are to be read."""
    folder = tmp_path_factory.mktemp("made")
    table = pa.table({"text": ["a", "b"]})
    return {
        "png": (image("PNG"), "image"),
        "jpeg": (image("JPEG"), "image"),
        "tiff": (image("TIFF"), "image"),
        "webp": (image("WEBP"), "image"),
        "bmp": (image("BMP"), "image"),
        "gif": (image("GIF"), "image"),
        "pdf": (pdf(), "pdf"),
        "docx": (saved(Document().save), "docx"),
        "pptx": (saved(Presentation().save), "pptx"),
        "xlsx": (saved(openpyxl.Workbook().save), "xlsx"),
        "epub": (database(folder, epub), "epub"),
        "zip": (archive(), "zip"),
        "empty zip": (saved(lambda buffer: zipfile.ZipFile(buffer, "w").close()), "zip"),
        "tar": (tar(), "tar"),
        "ustar": (tar(tarfile.USTAR_FORMAT), "tar"),
        "gnu tar": (tar(tarfile.GNU_FORMAT), "tar"),
        "gzip": (gzip.compress(PROSE, mtime=0), "gzip"),
        "tar.gz": (gzip.compress(tar(), mtime=0), "gzip"),
        "bzip2": (bz2.compress(PROSE), "bzip2"),
        "empty bzip2": (bz2.compress(b""), "bzip2"),
        "xz": (lzma.compress(PROSE), "xz"),
        "zstd": (zstandard.compress(PROSE), "zstd"),
        "sqlite": (database(folder, sqlite), "sqlite"),
        "duckdb": (database(folder, duck), "duckdb"),
        "parquet": (saved(lambda buffer: pa.parquet.write_table(table, buffer)), "parquet"),
        "arrow file": (arrow(stream=False), "arrow"),
        "arrow stream": (arrow(stream=True), "arrow"),
        "feather": (saved(lambda buffer: pa.feather.write_feather(table, buffer)), "arrow"),
        "warc": (warc(compressed=False), "warc"),
        "warc.gz": (warc(compressed=True), "warc"),
    }


def test_binary_formats_are_known_by_content_whatever_the_name_says(made: dict[str, tuple[bytes, str]]):
    for what, (data, name) in made.items():
        for file_name in ("file", "file.txt", "file.py", "file.pdf", "file.csv", "file.zip"):
            assert of(data, file_name).name == name, (what, file_name)


def test_an_arc_file_is_a_web_archive_packed_or_not():
    # The example of the format's description, https://archive.org/web/researcher/ArcFileFormat.php
    head = (
        b"filedesc://IA-001102.arc 0 19960923142103 text/plain 200 - - 0 IA-001102.arc 122\n2 0 Alexa Internet\n"
        b"URL IP-address Archive-date Content-type Result-code Checksum Location Offset Filename Archive-length\n"
    )
    assert of(head, "IA-001102.arc") == of(gzip.compress(head), "IA-001102.arc.gz") == FileType("warc")
    assert of(b"filedesc:// begins an ARC file\n", "a.txt") == FileType("text")


def test_files_of_the_system_s_programs_are_known(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(PROSE)
    for command, result in (
        ("gzip -k a.txt", ("a.txt.gz", "gzip")),
        ("bzip2 -k a.txt", ("a.txt.bz2", "bzip2")),
        ("xz -k a.txt", ("a.txt.xz", "xz")),
        ("zstd -q a.txt", ("a.txt.zst", "zstd")),
        ("zip -q a.zip a.txt", ("a.zip", "zip")),
        ("tar -cf a.tar a.txt", ("a.tar", "tar")),
        ("tar --format=v7 -cf v7.tar a.txt", ("v7.tar", "tar")),
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
        path = tmp_path / result[0]
        assert detect(Content("x", path=path)).name == result[1], command


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.py", b"import os\n", FileType("code", "python")),
        ("a.md", b"# Title\n", FileType("markdown")),
        ("a.rst", b"Title\n=====\n", FileType("rst")),
        ("a.tex", b"\\section{A}\n", FileType("latex")),
        ("a.txt", b"Baa.\n", FileType("text")),
        ("a.log", b"12:00 started\n", FileType("text")),
        ("a.yaml", b"a: 1\n", FileType("code", "yaml")),
        ("a.toml", b"a = 1\n", FileType("code", "toml")),
        ("a.html", b"<p>Baa</p>", FileType("html")),
        ("a.xml", b"<a/>", FileType("xml")),
        ("a.csv", b"a,b\n1,2\n", FileType("csv")),
        ("a.tsv", b"a\tb\n1\t2\n", FileType("tsv")),
        ("a.json", b'{"a": 1}', FileType("json")),
        ("a.jsonl", b'{"a": 1}\n', FileType("jsonl")),
        ("a.ipynb", b"{}", FileType("notebook")),
        ("run", b"#!/usr/bin/env python3\nprint()\n", FileType("code", "python")),
        ("a.txt", b'{"a": 1}', FileType("text")),
        ("a.txt", b"<!doctype html><p>", FileType("text")),
        ("a.php", b"<!doctype html><?php ?>", FileType("code", "php")),
        ("a.txt", "Baa.\n".encode("utf-16"), FileType("text")),
        ("a.py", "import os\n".encode("utf-16"), FileType("code", "python")),
        ("a.txt", "Baa, baa.\n".encode("utf-16-le"), FileType("text")),
        ("b.txt", "Baa, baa.\n".encode("utf-16-be"), FileType("text")),
        ("a.h", "\ufeffclass A {};\n".encode(), FileType("code", "c++")),
        ("a.h", "class A {};\n".encode("utf-32"), FileType("code", "c++")),
        ("page", b"\n<!-- a -->\n<!DOCTYPE html>\n<title>A</title>", FileType("html")),
        ("page", b"\xef\xbb\xbf<HTML><body>", FileType("html")),
        ("paper.pdf", b"<!doctype html><title>Not found</title>", FileType("html")),
        ("data", b'<?xml version="1.0"?><a/>', FileType("xml")),
        ("a.nxml", b'<!DOCTYPE article PUBLIC "-//NLM//DTD JATS//EN" "J.dtd">\n<article/>', FileType("xml")),
        ("a.dbk", b'<!-- a --><book xmlns="http://docbook.org/ns/docbook">', FileType("xml")),
        (
            "a.xsl",
            b'<xsl:stylesheet xmlns:xsl="http://www.w3.org/1999/XSL/Transform">',
            FileType("code", "xml"),
        ),
        ("data", b'<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml">', FileType("html")),
    ],
)
def test_the_name_settles_which_text_format_it_is(name: str, data: bytes, expected: FileType):
    assert of(data, name) == expected


@pytest.mark.parametrize(
    "beginning",
    ["BMW builds cars", "GIF89a is a format", "PK is a name", "PAR1 of 2", "DUCK", "I like a DUCK", "II* and more"],
)
def test_text_that_begins_like_a_format_stays_text(beginning: str):
    assert of(beginning.encode() + b"\n" + PROSE, "a.txt") == FileType("text")


def test_a_text_about_pdf_is_no_pdf_but_a_pdf_behind_other_bytes_is_one():
    assert of(b"A file begins with %PDF-1.4 and then\n" + PROSE, "a.md") == FileType("markdown")
    assert of(b"HTTP/1.1 200 OK\x00\r\n\r\n" + pdf()) == FileType("pdf")
    assert of(b"\n\n" + pdf()) == FileType("pdf")


def test_an_archive_whose_first_member_is_a_pdf_is_an_archive():
    assert of(tar(member=pdf())) == FileType("tar")


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "damaged", "an old Microsoft Office file"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(30), "unsupported", "7-Zip"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(30), "unsupported", "RAR"),
        (b"ID3\x04\x00\x00\x00" + bytes(30), "binary", "MP3"),
        (b"\x00\x00\x00\x20ftypisom" + bytes(30), "binary", "MP4"),
        (b"wOF2\x00\x01\x00\x00" + bytes(30), "binary", "font"),
        (b"\x93NUMPY\x01\x00", "binary", "NumPy"),
        (b"PARE" + bytes(30), "encrypted", "Parquet"),
        (b"FEA1" + bytes(100) + b"FEA1", "unsupported", "Feather version 1"),
        (b"RIFF\x10\x00\x00\x00WAVEfmt ", "binary", "audio"),
        (b"", "empty", "0 bytes"),
    ],
)
def test_known_formats_that_are_not_read_are_named(data: bytes, reason: str, words: str):
    found, detail = refusal(data)
    assert found == reason
    assert words in detail


def test_programs_and_compiled_code_of_this_system_are_refused(tmp_path: Path):
    assert refusal(Path(sys.executable).read_bytes()[:HEAD_BYTES])[0] == "binary"
    source = tmp_path / "a.py"
    source.write_text("a = 1\n")
    compiled = tmp_path / "a.pyc"
    program = f"import py_compile; py_compile.compile({str(source)!r}, {str(compiled)!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert refusal(compiled.read_bytes(), "a.pyc") == ("binary", "it is compiled Python")


def test_an_office_file_with_a_password_is_encrypted_and_an_opendocument_that_is_not_read_is_named():
    # Word puts the encrypted document into a file of the old format.
    locked = Path(__file__).parent / "files" / "locked.docx"
    assert refusal(locked.read_bytes(), "a.docx")[0] == "encrypted"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("mimetype", "application/vnd.oasis.opendocument.graphics")
    assert refusal(buffer.getvalue(), "a.odg")[1] == "it is an OpenDocument drawing, formula or database"


def test_a_suffix_that_promises_a_format_is_not_believed():
    assert refusal(b"\x00\x01\x02garbage" * 50, "a.png") == (
        "damaged",
        "it does not begin like a file of type image",
    )
    assert refusal(b"\x00\x01\x02garbage" * 50, "a.zip")[0] == "damaged"


def test_a_text_name_on_binary_content_is_left_to_the_reader_of_text_to_refuse():
    assert of(b"\x00\x01\x02\xfe" * 200, "a.py") == FileType("text")
    assert of(b"\x00\x01\x02\xfe" * 200, "a.csv") == FileType("text")


def test_a_pointer_of_git_lfs_is_not_taken_for_the_text_itself():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    assert refusal(pointer, "model.txt")[0] == "missing"
    assert refusal(pointer, "paper.pdf")[0] == "missing"


def test_the_model_is_asked_where_name_and_signature_are_silent():
    code = b"import os\n\n\ndef main():\n    for name in os.listdir('.'):\n        print(name)\n\n\nmain()\n"
    assert of(code, "program.unknown") == FileType("code", "python")
    records = json.dumps([{"name": "Dolly", "age": 6}, {"name": "Shaun", "age": 3}], indent=1).encode()
    assert of(records, "records") == FileType("json")
    assert of(PROSE, "words.unknown") == FileType("text")
    assert refusal(bytes(range(256)) * 20, "data.unknown")[0] in {"binary", "unsupported"}


def test_what_the_model_is_not_sure_of_is_text():
    assert of(b"a\n", "unknown.thing") == FileType("text")


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "magika", None)
    detection._model.cache_clear()
    yield
    detection._model.cache_clear()


@pytest.mark.usefixtures("without_model")
def test_without_the_model_unknown_text_is_text_and_unknown_binary_is_refused():
    assert of(b"import os\n" * 30, "program.unknown") == FileType("text")
    assert of(b"import os\n" * 30, "program.py") == FileType("code", "python")
    assert refusal(bytes(range(256)) * 20)[0] == "binary"


def test_the_model_is_not_loaded_for_files_that_need_no_guess(made: dict[str, tuple[bytes, str]], monkeypatch):
    def never() -> None:
        raise AssertionError("the model was asked")

    monkeypatch.setattr(detection, "_model", never)
    for data, name in made.values():
        assert of(data).name == name
    assert of(b"x = 1\n", "a.py").language == "python"
    assert of(PROSE, "README") == FileType("text")


def test_detection_agrees_with_the_model_on_made_files(made: dict[str, tuple[bytes, str]]):
    model = Magika()
    labels = {**dict.fromkeys(("png", "jpeg", "tiff", "webp", "bmp", "gif"), "image"), "bzip": "bzip2"}
    for what in ("png", "jpeg", "tiff", "webp", "bmp", "gif", "pdf", "docx", "pptx", "xlsx", "epub", "parquet"):
        data, name = made[what]
        label = str(model.identify_bytes(data).output.label)
        assert labels.get(label, label) == name, what


def test_only_the_beginning_of_a_large_file_is_read(tmp_path: Path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(PROSE)
        file.truncate(2**40)
    assert detect(Content("large.txt", path=path)) == FileType("text")


def test_a_zip_with_a_directory_that_lies_is_a_zip(made: dict[str, tuple[bytes, str]]):
    data = bytearray(made["docx"][0])
    end = data.rfind(b"PK\x05\x06")
    for field in range(4, 22):
        broken = bytearray(data)
        broken[end + field] ^= 0xFF
        assert of(bytes(broken)).name in {"zip", "docx"}


@given(st.binary(min_size=1, max_size=3000), st.sampled_from(["a", "a.py", "a.pdf", "a.zip", "a.csv", "a.docx", ""]))
def test_any_bytes_are_of_a_listed_type_or_refused(data: bytes, name: str):
    try:
        assert of(data, name).name in FORMATS
    except ExtractionError as error:
        assert error.reason in {"empty", "binary", "unsupported", "damaged", "missing", "encrypted"}


@pytest.mark.parametrize(
    "text",
    [
        "<!-- -->" * 500,
        "<!--" * 1000,
        "<?xml ?>" * 500,
        "\n" * 4000,
        "template " * 400,
        "a(" * 2000,
        "a(" + ")" * 4000,
        "#!/bin/" + "1." * 2000 + "x",
        "\n@" * 2000,
        " \t" * 2000,
    ],
)
@pytest.mark.parametrize("name", ["a", "a.h", "a.m", "a.pl", "a.v", "a.t"])
def test_text_made_to_keep_patterns_busy_is_told_at_once(text: str, name: str, monkeypatch):
    monkeypatch.setattr(detection, "_model", lambda: None)
    assert of(text.encode(), name).name in {"text", "code", "xml"}


def test_damaged_files_are_of_a_listed_type_or_refused(made: dict[str, tuple[bytes, str]], monkeypatch):
    monkeypatch.setattr(detection, "_model", lambda: None)
    generator = random.Random(1)
    for data, _ in made.values():
        for _ in range(60):
            broken = bytearray(data[: generator.randrange(1, len(data) + 1)])
            for _ in range(generator.randrange(8)):
                broken[generator.randrange(min(len(broken), 600))] = generator.randrange(256)
            try:
                assert of(bytes(broken), generator.choice(["a", "a.txt", "a.xlsx"])).name in FORMATS
            except ExtractionError:
                continue
