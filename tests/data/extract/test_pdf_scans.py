from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pypdfium2
import pytest
from PIL import Image, ImageDraw, ImageFont

from sheepop.data.extract import image as image_module
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted, Refused
from sheepop.data.extract.page_lines import Line, Page

Extract = Callable[..., list[Extracted | Refused]]
Drawn = Callable[..., bytes]


def picture(text: str, size: int = 28) -> Image.Image:
    """A picture of lines of text."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)
    image = Image.new("L", (700, 40 + int(1.6 * size) * (text.count("\n") + 1)), 255)
    ImageDraw.Draw(image).multiline_text((20, 20), text, font=font, fill=0, spacing=0.5 * size)
    return image


def test_a_scanned_page_is_recognised_beside_a_page_of_text(extract_pdf: Extract, pages_of: Drawn) -> None:
    scan = io.BytesIO()
    picture("The quick brown fox jumps\nover the lazy dog.").save(scan, "PDF", resolution=150)
    merged = pypdfium2.PdfDocument(pages_of("A page of text."))
    merged.import_pages(pypdfium2.PdfDocument(scan.getvalue()))
    buffer = io.BytesIO()
    merged.save(buffer)

    (document,) = extract_pdf(buffer.getvalue(), ocr=True)

    assert isinstance(document, Extracted)
    assert " ".join(document.text.split()) == "A page of text. The quick brown fox jumps over the lazy dog."
    assert document.marks == ((0, "page 1"), (17, "page 2"))
    assert document.metadata["recognised_pages"] == "1"
    assert float(document.metadata["recognition_confidence"]) > 0.9


def test_a_scan_that_lies_on_its_side_is_read_beside_one_that_recognition_cannot_read(extract_pdf: Extract) -> None:
    scan = io.BytesIO()
    turned = picture("The quick brown fox jumps\nover the lazy dog.").rotate(270, expand=True)
    turned.save(scan, "PDF", resolution=150, save_all=True, append_images=[picture("Все люди рождаются\nсвободными")])

    refused, document = extract_pdf(scan.getvalue(), ocr=True)

    assert isinstance(document, Extracted)
    assert " ".join(document.text.split()) == "The quick brown fox jumps over the lazy dog."
    assert isinstance(refused, Refused)
    assert (refused.place, refused.reason) == ("page 2", "illegible")


def test_scanned_pages_are_refused_where_recognition_is_off_or_not_installed(
    extract_pdf: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = io.BytesIO()
    picture("A scan").save(scan, "PDF", save_all=True, append_images=[picture("Another")])
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    image_module.engine.cache_clear()

    assert [(item.place, item.reason) for item in extract_pdf(scan.getvalue()) if isinstance(item, Refused)] == [
        ("page 1", "unsupported"),
        ("page 2", "unsupported"),
    ]
    missing = [item for item in extract_pdf(scan.getvalue(), ocr=True) if isinstance(item, Refused)]
    assert [(item.place, item.reason) for item in missing] == [("page 1", "not_installed"), ("page 2", "not_installed")]
    assert "install sheepop[ocr]" in missing[0].detail


def test_a_long_scan_is_one_document_and_shows_signs_of_life(
    extract_pdf: Extract, alive: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["A shepherd", "counts sheep", "before the", "rain comes", "once more"])

    def recognised(image: Image.Image, config: ExtractConfig, number: int) -> Page:
        lines = [Line(next(texts), 10, 10, 400, 30, 15, 60)]
        return Page(number, image.height, lines, confidence=0.95)

    monkeypatch.setattr(image_module, "recognise", recognised)
    scan = io.BytesIO()
    picture("A").save(scan, "PDF", save_all=True, append_images=[picture("B")] * 4)

    (document,) = extract_pdf(scan.getvalue(), ocr=True)

    assert isinstance(document, Extracted)
    assert document.text == "A shepherd\n\ncounts sheep\n\nbefore the\n\nrain comes\n\nonce more"
    assert document.marks == ((0, "page 1"), (12, "page 2"), (26, "page 3"), (38, "page 4"), (50, "page 5"))
    assert document.metadata["recognised_pages"] == "5"
    assert len(alive) == 5
