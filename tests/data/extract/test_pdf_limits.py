from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pypdfium2
import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.extract.pdf import render

Extract = Callable[..., list[Extracted | Refused]]
Read = Callable[..., Extracted]
Drawn = Callable[..., bytes]


def assembled(objects: Sequence[bytes]) -> bytes:
    """A PDF of these objects, written by hand; the first is the catalogue."""
    data, offsets = b"%PDF-1.7\n", []
    for number, item in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    trailer = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (count, len(data))
    return data + b"xref\n0 %d\n0000000000 65535 f \n%b%b" % (count, table, trailer)


def page_with(content: bytes, box: bytes = b"0 0 612 792") -> bytes:
    """A PDF with one page that has this content stream."""
    packed = zlib.compress(content)
    return assembled(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[%b]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>" % box,
            b"<</Length %d/Filter/FlateDecode>>stream\n%b\nendstream" % (len(packed), packed),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        ]
    )


def test_a_document_that_is_too_long_is_cut_between_pages(extract_pdf: Extract, pages_of: Drawn) -> None:
    data = pages_of(*(f"Page {number} " + "says bah " * 9 for number in range(1, 31)))

    documents = [item for item in extract_pdf(data, max_document_bytes=1024) if isinstance(item, Extracted)]

    assert [document.place for document in documents] == ["pages 1 to 11", "pages 12 to 22", "pages 23 to 30"]
    assert all(len(document.text) <= 1024 for document in documents)
    marks = [name for document in documents for _, name in document.marks]
    assert marks == [f"page {number}" for number in range(1, 31)]
    assert all(d.text[o:].startswith(name.replace("p", "P")) for d in documents for o, name in d.marks)


def test_a_bad_page_is_refused_and_the_others_are_read(extract_pdf: Extract) -> None:
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 6 0 R/Resources<</Font<</F 7 0 R>>>>>>"
    text = b"BT /F 12 Tf 72 700 Td (A good page.) Tj ET"
    data = assembled(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R 4 0 R 5 0 R]/Count 3>>",
            page,
            b"[/This /is /no /page]",
            page,
            b"<</Length %d>>stream\n%b\nendstream" % (len(text), text),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        ]
    )

    refused, document = extract_pdf(data)

    assert isinstance(refused, Refused)
    assert (refused.place, refused.reason) == ("page 2", "damaged")
    assert isinstance(document, Extracted)
    assert document.text == "A good page.\n\nA good page."
    assert [name for _, name in document.marks] == ["page 1", "page 3"]


def test_a_count_of_pages_that_do_not_exist_ends(extract_pdf: Extract) -> None:
    data = assembled(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1000000>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>",
        ]
    )
    refused: list[Extracted | Refused] = []

    with pytest.raises(ExtractionError, match="20 pages in a row"):
        refused.extend(extract_pdf(data))


@pytest.mark.parametrize("data", [b"", b"%PDF-1.7\nno more", b"not a PDF at all"])
def test_what_is_no_pdf_is_damaged(extract_pdf: Extract, data: bytes) -> None:
    with pytest.raises(ExtractionError) as raised:
        extract_pdf(data)

    assert raised.value.reason == "damaged"


def test_a_file_of_blank_pages_is_empty(extract_pdf: Extract, pages_of: Drawn) -> None:
    with pytest.raises(ExtractionError) as raised:
        extract_pdf(pages_of("", ""))

    assert raised.value.reason == "empty"


def test_damage_anywhere_ends_in_documents_or_refusals(tmp_path: Path, drawn: Drawn, pages_of: Drawn) -> None:
    def grid(canvas: Canvas) -> None:
        canvas.grid([72, 200, 300, 400], [700, 680, 660, 640])
        for row in range(3):
            for column in range(3):
                canvas.drawString(80 + 120 * column, 685 - 20 * row, f"cell {row} {column}")

    good = [
        drawn(grid),
        pages_of("one", "two", "three"),
        drawn(lambda canvas: canvas.drawString(72, 700, "x"), encrypt=StandardEncryption("", "owner")),
    ]
    generator = random.Random(3)
    reasons = set()
    with closing(Extraction(ExtractConfig(ocr=False))) as extraction:
        for number in range(60):
            data = bytearray(good[number % len(good)])
            if number % 4 == 0:
                del data[generator.randrange(len(data)) :]
            for _ in range(generator.choice([1, 8, 64])):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path = tmp_path / "damaged.pdf"
            path.write_bytes(b"%PDF-1.4\n" + data[9:])
            items = list(extraction.documents(path, "damaged.pdf"))
            assert items
            reasons |= {item.reason for item in items if isinstance(item, Refused)}

    # Nothing hangs, dies or fails in a way that was not foreseen.
    assert reasons <= {"damaged", "empty", "encrypted", "unsupported", "oversized"}


def test_a_page_of_countless_lines_is_read_without_a_search_for_tables(read_pdf: Read) -> None:
    generator = random.Random(1)
    lines = b"".join(b"%d %d m %d %d l S\n" % tuple(generator.randrange(600) for _ in "xyxy") for _ in range(15_000))

    document = read_pdf(page_with(lines + b"BT /F 12 Tf 72 700 Td (Under the scribble.) Tj ET"))

    assert document.text == "Under the scribble."
    assert document.metadata["pages_not_searched_for_tables"] == "1"


def test_a_page_that_is_nothing_but_countless_lines_is_not_drawn(extract_pdf: Extract) -> None:
    data = page_with(b"0 0 m 600 700 l S\n" * 25_000)

    assert extract_pdf(data, ocr=True) == [
        Refused("page 1", "oversized", "it is a drawing with too many parts to search for text")
    ]


@pytest.mark.parametrize("box", [b"0 0 5000000 5000000", b"0 0 1 1000000", b"0 0 0 0", b"0 0 14400 14400"])
def test_a_page_of_any_size_is_drawn_within_limits(box: bytes) -> None:
    with pypdfium2.PdfDocument(page_with(b"0 0 m 100 100 l S", box)) as document:
        image = render(document[0], 1_000_000)

    assert image.width * image.height <= 1_010_000
    assert min(image.size) >= 1
