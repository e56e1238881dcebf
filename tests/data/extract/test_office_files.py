from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import detect
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

FILES = Path(__file__).parent / "files"
# What `sheep.odt`, `sheep.doc` and `sheep.rtf` were made of.
SHEEP = """# Of sheep

A. Shepherd

# Sheep

They eat grass and hay.[^1] And 2 < 3 & so on.

1. one
2. two
  - under two
3. three
- a bullet
- another

| name | born |
| --- | --- |
| Dolly | 1996 |
| Molly | 1997 |

## Wool

```
shear(sheep)
  twice
```

Überall größere Schafe; 羊も食べる.

[^1]: And herbs."""
SLIDES = "# Sheep\n\n{0}They eat grass.\n\nNotes:\nSay so.\n\n# Wool\n\n{0}Shorn in spring."
FLOCK = """# Sheep

| name | born | weight | ram | note |  |
| --- | --- | --- | --- | --- | --- |
| Dolly\\|1 | 1996-07-05 | 45.5 | {no} | first clone |  |
| Molly | 1997-07-09 06:30:00 | 1000000000000000 | {yes} |  |  |
|  | 06:30:00 | 0.3 |  | spaced out |  |
| sum |  | {sum} |  | Dolly\\|1 |  |
| merged |  |  |  |  |  |
|  |  |  |  |  | far |"""


def data_of(name: str) -> bytes:
    data = (FILES / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def document(items: list[Extracted | Refused]) -> Extracted:
    (item,) = items
    assert isinstance(item, Extracted), item
    return item


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sheep.odt", "odt"),
        ("talk.odp", "odp"),
        ("sheep.ods", "ods"),
        ("sheep.rtf", "rtf"),
        ("sheep.doc", "doc"),
        ("talk.ppt.gz", "ppt"),
        ("sheep.xls", "xls"),
        ("workbook.xlsb", "xlsb"),
        ("message.msg", "msg"),
        ("wool.heic", "image"),
        ("wool.avif", "image"),
    ],
)
def test_the_content_says_what_a_file_is(name: str, kind: str) -> None:
    assert detect(Content("a", data=data_of(name))).name == kind


def test_a_text_of_pandoc_becomes_the_markdown_it_was_made_of(read_as: ReadAs) -> None:
    item = document(read_as("odt", data_of("sheep.odt")))
    assert item.text == SHEEP
    assert (item.metadata["title"], item.metadata["author"]) == ("Of sheep", "A. Shepherd")


def test_an_old_word_file_keeps_what_the_library_tells_of_it(read_as: ReadAs) -> None:
    known = SHEEP.replace("[^1]: ", "").replace("[^1]", "").replace("```\n", "").replace("\n```", "")
    known = known.replace("1. ", "- ").replace("2. ", "- ").replace("3. ", "- ")
    assert document(read_as("doc", data_of("sheep.doc"))).text == known


def test_rich_text_keeps_every_word(read_as: ReadAs) -> None:
    text = document(read_as("rtf", data_of("sheep.rtf"))).text
    left_out = {"#", "##", "-", "|", "---", "```"}
    expected = SHEEP.replace("[^1]:", " ").replace("[^1]", " ").replace("And herbs.", "").split()
    found = text.replace("And herbs.", " ").replace("|", " ").replace("•", "-").replace("–", "-").split()
    assert [word for word in found if word not in left_out] == [word for word in expected if word not in left_out]
    assert "hay. \u00a0And herbs.\n And 2 < 3" in text


@pytest.mark.parametrize(("name", "kind", "bullet"), [("talk.odp", "odp", "- "), ("talk.ppt.gz", "ppt", "")])
def test_slides_have_marks_titles_and_notes(read_as: ReadAs, name: str, kind: str, bullet: str) -> None:
    item = document(read_as(kind, data_of(name)))
    assert item.text == SLIDES.format(bullet)
    assert item.marks == ((0, "slide 1"), (item.text.index("# Wool"), "slide 2"))


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("sheep.xls", "xls", {"no": "FALSE", "yes": "TRUE", "sum": "1.00000000000005e+15"}),
        ("sheep.ods", "ods", {"no": "0", "yes": "1", "sum": "1000000000000050"}),
    ],
)
def test_the_sheets_of_libreoffice_become_tables(read_as: ReadAs, name: str, kind: str, values: dict[str, str]) -> None:
    one, other = read_as(kind, data_of(name))
    assert isinstance(one, Extracted)
    assert isinstance(other, Extracted)
    assert one.text == FLOCK.format(**values)
    assert (one.kind, one.place, dict(one.metadata)) == ("table", "sheet Sheep", {})
    assert (other.text, other.metadata["hidden"]) == ("# Hidden one\n\n| a | b |\n| --- | --- |", "yes")


def test_a_binary_workbook_of_excel_becomes_tables(read_as: ReadAs) -> None:
    one, other = read_as("xlsb", data_of("workbook.xlsb"))
    times = "2010-10-10 | 2010-10-10 10:10:10 | 10:10:10 | 10:10:10.100000 | 10 days, 15:10:10"
    first, *others = ("| " + " | ".join([f"line{number}"] * 3) + " |" for number in (1, 2, 3))
    assert isinstance(one, Extracted)
    assert isinstance(other, Extracted)
    assert one.text == f"# Sheet1\n\n| String | 1 | 1.1 | TRUE | FALSE | {times} |\n|{' --- |' * 10}"
    assert other.text == "\n".join(["# Sheet3\n", first, "| --- | --- | --- |", *others])


@pytest.mark.parametrize("kind", ["odt", "odp", "ods"])
def test_an_encrypted_opendocument_is_refused_as_such(read_as: ReadAs, kind: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("META-INF/manifest.xml", "<m><file-entry><encryption-data/></file-entry></m>")
        file.writestr("content.xml", b"\x01\x02")
    (refused,) = read_as(kind, buffer.getvalue())
    assert isinstance(refused, Refused)
    assert refused.reason == "encrypted"


@pytest.mark.parametrize("kind", ["doc", "ppt", "xls", "xlsb", "rtf", "odt", "odp", "msg"])
def test_damaged_files_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]], kind: str) -> None:
    name = next(path.name for path in sorted(FILES.iterdir()) if path.suffixes[:1] == [f".{kind}"])
    for copy in damaged(data_of(name), 12):
        assert read_as(kind, copy)


def test_pictures_of_phones_are_read(tmp_path: Path) -> None:
    for name in ("wool.heic", "wool.avif"):
        (item,) = Dispatcher(ExtractConfig(), tmp_path).documents(Content(name, data=data_of(name)))
        assert isinstance(item, Extracted), item
        assert " ".join(item.text.split()) == "The sheep are well and so is the wool."
