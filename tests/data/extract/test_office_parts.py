from __future__ import annotations

import datetime
import io
import struct
import zipfile
from collections.abc import Callable

import docx
import openpyxl
import pptx
import pytest

from sheepop.data.extract.interface import Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]
KINDS = ["docx", "pptx", "xlsx", "epub"]
OFFICE = KINDS[:3]
RELATIONSHIPS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"'
    ' Target="main.xml"/></Relationships>'
)


def package(parts: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in {"_rels/.rels": RELATIONSHIPS.encode(), **parts}.items():
            file.writestr(name, data)
    return buffer.getvalue()


def refusal(items: list[Extracted | Refused]) -> Refused:
    (item,) = items
    assert isinstance(item, Refused), item
    return item


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_unpacks_to_too_much_is_a_bomb(read_as: ReadAs, kind: str) -> None:
    bomb = package({"main.xml": bytes(65 * 2**20)})
    assert refusal(read_as(kind, bomb)).reason == "bomb"


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_share_their_bytes_are_a_bomb(read_as: ReadAs, kind: str) -> None:
    data = bytearray(package({"a.xml": b"<a/>" * 100, "b.xml": b"<a/>" * 100}))
    first, second = (data.find(b"PK\x01\x02", at) for at in (0, data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 1)))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    assert refusal(read_as(kind, bytes(data))).reason == "bomb"


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_members_are_a_bomb(read_as: ReadAs, kind: str) -> None:
    parts = {f"{number}.xml": b"" for number in range(50)}
    assert refusal(read_as(kind, package(parts), max_members=20)).reason == "bomb"


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_with_a_password_is_encrypted(read_as: ReadAs, kind: str) -> None:
    data = bytearray(package({"main.xml": b"<a/>"}))
    at = data.find(b"PK\x01\x02")
    data[at + 8 : at + 10] = struct.pack("<H", 1)
    assert refusal(read_as(kind, bytes(data))).reason == "encrypted"


@pytest.mark.parametrize("kind", KINDS)
def test_compression_that_comes_whole_is_not_read(read_as: ReadAs, kind: str) -> None:
    assert refusal(read_as(kind, package({"main.xml": b"<a/>"}, zipfile.ZIP_LZMA))).reason == "unsupported"


@pytest.mark.parametrize("kind", OFFICE)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_definitions_of_entities_are_a_bomb_in_any_encoding(read_as: ReadAs, kind: str, encoding: str) -> None:
    part = '<?xml version="1.0"?>\n<!-- a --><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'
    assert refusal(read_as(kind, package({"any/part.xml": part.encode(encoding)}))).reason == "bomb"


@pytest.mark.parametrize("kind", OFFICE)
def test_a_part_that_hides_its_beginning_is_not_read(read_as: ReadAs, kind: str) -> None:
    part = f"<!--{'x' * 70_000}--><!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"
    assert refusal(read_as(kind, package({"part.xml": part.encode()}))).reason == "bomb"
    for encoding in ("cp037", "utf-7"):
        part = f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE a><a/>'
        assert refusal(read_as(kind, package({"part.xml": part.encode(encoding)}))).reason == "unsupported"


# The namespaces of the strict form beside those of the usual one (ECMA-376, part 1, annex A; part 4, annex A).
STRICT = {
    f"http://schemas.openxmlformats.org/{usual}": f"http://purl.oclc.org/ooxml/{strict}"
    for usual, strict in {
        "officeDocument/2006/relationships": "officeDocument/relationships",
        "wordprocessingml/2006/main": "wordprocessingml/main",
        "presentationml/2006/main": "presentationml/main",
        "spreadsheetml/2006/main": "spreadsheetml/main",
        "drawingml/2006/main": "drawingml/main",
    }.items()
}


def in_strict_form(data: bytes) -> bytes:
    parts = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for name in file.namelist():
            parts[name] = file.read(name)
            for usual, strict in STRICT.items():
                parts[name] = parts[name].replace(f"{usual}".encode(), strict.encode())
    return package(parts)


def test_the_strict_form_is_read_as_the_usual_one(read_as: ReadAs) -> None:
    document, slides, workbook = docx.Document(), pptx.Presentation(), openpyxl.Workbook()
    document.add_heading("Sheep", 1)
    document.add_paragraph("They eat grass.", style="List Number")
    slides.slides.add_slide(slides.slide_layouts[0]).shapes.title.text = "Wool"
    workbook.active.append(["name", "born"])
    workbook.active.append(["Dolly", datetime.date(1996, 7, 5)])
    for kind, save, text in (
        ("docx", document.save, "# Sheep\n\n1. They eat grass."),
        ("pptx", slides.save, "# Wool"),
        ("xlsx", workbook.save, "# Sheet\n\n| name | born |\n| --- | --- |\n| Dolly | 1996-07-05 |"),
    ):
        buffer = io.BytesIO()
        save(buffer)
        for data in (buffer.getvalue(), in_strict_form(buffer.getvalue())):
            (item,) = read_as(kind, data)
            assert isinstance(item, Extracted), item
            assert item.text == text


@pytest.mark.parametrize("kind", OFFICE)
def test_a_missing_main_part_is_damage(read_as: ReadAs, kind: str) -> None:
    assert refusal(read_as(kind, package({}))).reason == "damaged"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x05\x06" + bytes(18), b"not a zip at all" * 100])
def test_what_is_no_package_is_damaged(read_as: ReadAs, kind: str, data: bytes) -> None:
    assert refusal(read_as(kind, data)).reason == "damaged"
