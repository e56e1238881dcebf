from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import mkepub
import pytest

from sheepop.data.extract.interface import Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0"><rootfiles>'
    '<rootfile full-path="OEBPS/my%20book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PAGE = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>x</title></head><body>{}</body></html>'
CHAPTERS = {"one": "<h1>The island</h1><p>Sheep live here.</p>", "two": "<p>They eat&nbsp;grass.</p><pre>a\n  b</pre>"}


def made(tmp_path: Path) -> bytes:
    book = mkepub.Book(title="Islands", author="A. Writer", language="en", rights="CC BY 4.0")
    book.add_page(
        "The island", "<h1>The island</h1><p>Sheep live &amp; eat here.</p><ul><li>rams</li><li>ewes</li></ul>"
    )
    second = book.add_page("Wool", "<p>It is warm.</p>")
    book.add_page("Colours", "<p>White.</p>", parent=second)
    book.save(str(tmp_path / "made.epub"))
    book.tempdir.cleanup()
    return (tmp_path / "made.epub").read_bytes()


def by_hand(
    spine: str = "two one",
    files: Mapping[str, str | bytes] | None = None,
    extra: str = "",
    date: str = "2020-02-03T04:05",
) -> bytes:
    """A book of EPUB 2 in which the reading order is not that of the names, written without any library."""
    items = "".join(f'<item id="{c}" href="text/{c}.xhtml" media-type="application/xhtml+xml"/>' for c in CHAPTERS)
    items += '<item id="toc" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
    order = "".join(f'<itemref idref="{name}"/>' for name in spine.split())
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
        "<dc:title>By hand</dc:title><dc:creator>A</dc:creator><dc:creator>B</dc:creator>"
        f"<dc:date>{date}</dc:date></metadata><manifest>{items}{extra}</manifest><spine>{order}</spine></package>"
    )
    points = '<navPoint><navLabel><text>On  sheep</text></navLabel><content src="text/two.xhtml#top"/></navPoint>'
    every: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/my book.opf": package,
        "OEBPS/toc.ncx": f'<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>{points}</navMap></ncx>',
        **{f"OEBPS/text/{name}.xhtml": PAGE.format(body) for name, body in CHAPTERS.items()},
        **(files or {}),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in every.items():
            if content:
                file.writestr(name, content)
    return buffer.getvalue()


def book(items: list[Extracted | Refused]) -> Extracted:
    (item,) = items
    assert isinstance(item, Extracted), item
    assert item.kind == "prose"
    return item


def test_a_book_of_mkepub_is_read_in_order_with_its_chapters_marked(read_as: ReadAs, tmp_path: Path) -> None:
    item = book(read_as("epub", made(tmp_path)))
    assert item.text == "# The island\n\nSheep live & eat here.\n\n- rams\n- ewes\n\nIt is warm.\n\nWhite."
    assert [name for _, name in item.marks] == ["chapter 1: The island", "chapter 2: Wool", "chapter 3: Colours"]
    assert [item.text[begin:][:3] for begin, _ in item.marks] == ["# T", "It ", "Whi"]
    facts = {name: value for name, value in item.metadata.items() if name != "date"}
    assert facts == {"title": "Islands", "author": "A. Writer", "language": "en", "rights": "CC BY 4.0"}


def test_a_book_of_pandoc_becomes_the_markdown_it_was_made_of(read_as: ReadAs, tmp_path: Path) -> None:
    pandoc = shutil.which("pandoc")
    if pandoc is None:
        pytest.skip("pandoc is not installed")
    source = (
        "# Sheep\n\nThey eat grass.\n\n1. one\n2. two\n\n# Wool\n\n``` python\ndef f():\n    return 1\n```\n\n> warm\n"
    )
    target = tmp_path / "made.epub"
    command = [pandoc, "-f", "markdown", "--metadata", "title=Islands", "-o", target]
    subprocess.run(command, input=source.encode(), check=True)
    item = book(read_as("epub", target.read_bytes()))
    assert item.text == f"# Islands\n\n{source.strip().replace('``` python', '```python')}"


def test_the_order_is_that_of_the_spine_and_titles_come_from_the_table_of_contents(read_as: ReadAs) -> None:
    item = book(read_as("epub", by_hand()))
    assert item.text == "They eat grass.\n\n```\na\n  b\n```\n\n# The island\n\nSheep live here."
    assert item.marks == ((0, "chapter 1: On sheep"), (item.text.index("# The"), "chapter 2: The island"))
    assert dict(item.metadata) == {"title": "By hand", "author": "A; B", "date": "2020-02-03"}


@pytest.mark.parametrize(("stated", "read"), [("20240131", "2024"), ("2024-01", "2024-01"), ("in 2024", "")])
def test_a_date_is_read_as_far_as_it_is_written_with_dashes(read_as: ReadAs, stated: str, read: str) -> None:
    assert book(read_as("epub", by_hand(date=stated))).metadata.get("date", "") == read


def test_a_chapter_that_is_missing_or_damaged_is_refused_by_itself(read_as: ReadAs) -> None:
    items = read_as("epub", by_hand(files={"OEBPS/text/one.xhtml": b"\x00\x01" * 20, "OEBPS/text/two.xhtml": b""}))
    assert [(item.place, item.reason) for item in items if isinstance(item, Refused)] == [
        *(("chapter 1", "missing"), ("chapter 2", "binary"), ("", "empty")),
    ]
    first, second = read_as("epub", by_hand(files={"OEBPS/text/two.xhtml": b""}))
    assert isinstance(first, Refused)
    assert isinstance(second, Extracted)
    assert second.text == "# The island\n\nSheep live here."


def test_a_chapter_whose_bytes_are_damaged_is_refused_by_itself(read_as: ReadAs) -> None:
    filler = {"OEBPS/text/two.xhtml": PAGE.format(f"<p>{'sheep and wool and grass ' * 50}</p>")}
    data = bytearray(by_hand(files=filler))
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        begin = file.getinfo("OEBPS/text/two.xhtml").header_offset
    data[begin + 60] ^= 0xFF
    refused, kept = read_as("epub", bytes(data))
    assert isinstance(refused, Refused)
    assert (refused.place, refused.reason) == ("chapter 1", "damaged")
    assert isinstance(kept, Extracted)


def test_a_protected_book_is_encrypted_and_one_with_obfuscated_fonts_is_not(read_as: ReadAs) -> None:
    def encryption(method: str) -> dict[str, str | bytes]:
        inner = f'<EncryptionMethod xmlns="http://www.w3.org/2001/04/xmlenc#" Algorithm="{method}"/>'
        return {"META-INF/encryption.xml": f"<encryption><EncryptedData>{inner}</EncryptedData></encryption>"}

    assert book(read_as("epub", by_hand(files=encryption("http://www.idpf.org/2008/embedding")))).text
    (refused,) = read_as("epub", by_hand(files=encryption("http://www.w3.org/2001/04/xmlenc#aes128-cbc")))
    assert isinstance(refused, Refused)
    assert refused.reason == "encrypted"


def test_names_that_lead_out_of_the_book_are_only_missing(read_as: ReadAs) -> None:
    extra = '<item id="out" href="../../../../etc/passwd" media-type="application/xhtml+xml"/>'
    refused, kept = read_as("epub", by_hand(spine="out one", extra=extra))
    assert isinstance(refused, Refused)
    assert refused.reason == "missing"
    assert isinstance(kept, Extracted)


def test_entities_in_the_package_are_not_expanded(read_as: ReadAs) -> None:
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY a0 "lol">{entities}]><x>&a11;</x>'
    (refused,) = read_as("epub", by_hand(files={"META-INF/container.xml": bomb}))
    assert isinstance(refused, Refused)
    assert refused.reason == "bomb"


@pytest.mark.parametrize("missing", ["META-INF/container.xml", "OEBPS/my book.opf"])
def test_a_book_without_its_list_of_contents_is_damaged(read_as: ReadAs, missing: str) -> None:
    (refused,) = read_as("epub", by_hand(files={missing: b""}))
    assert isinstance(refused, Refused)
    assert refused.reason == "damaged"


def test_what_is_no_page_in_the_order_of_the_book_is_refused_by_itself(read_as: ReadAs) -> None:
    extra = '<item id="picture" href="text/p.svg" media-type="image/svg+xml"/>'
    files = {"OEBPS/text/p.svg": "<svg/>"}
    picture, unknown, kept = read_as("epub", by_hand(spine="picture nowhere one one", extra=extra, files=files))
    assert isinstance(picture, Refused)
    assert (picture.place, picture.reason) == ("chapter 1", "unsupported")
    assert unknown == Refused("chapter 2", "missing", "called nowhere: the book has no such file")
    assert isinstance(kept, Extracted)
    assert kept.marks == ((0, "chapter 3: The island"),)


def test_a_book_without_text_is_empty(read_as: ReadAs) -> None:
    (refused,) = read_as("epub", by_hand(spine=""))
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"


def test_damaged_books_are_read_or_refused(
    read_as: ReadAs, damaged: Callable[..., Iterator[bytes]], damaged_parts: Callable[..., Iterator[bytes]]
) -> None:
    for copies in (damaged, damaged_parts):
        for copy in copies(by_hand()):
            items = read_as("epub", copy)
            assert items
            assert all(isinstance(item, Refused) or item.text.strip() for item in items)
