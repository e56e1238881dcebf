"""PDF: text in reading order with tables as Markdown, and recognition of what is only a picture of text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, BinaryIO

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.ocr import recognise
from sheepop.data.extract.page_lines import Page
from sheepop.data.extract.paged_text import Gathering
from sheepop.data.extract.pdf_page import page_objects, render
from sheepop.data.extract.pdf_tables import TooManyLinesError, find_tables
from sheepop.data.extract.pdf_words import lines_of, read_words

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

    from sheepop.data.extract.config import ExtractConfig
    from sheepop.data.extract.page_lines import Line
    from sheepop.data.extract.pdf_page import PageObjects
    from sheepop.data.extract.pdf_words import PageWords

# A page with fewer letters than this, under pictures on at least this share of it, is a scan with a stamp.
_FEW_LETTERS = 200
_PICTURE_SHARE = 0.5
# Where more of the characters than this have no known meaning, the font hides what it says.
_MEANINGLESS_SHARE = 0.3
_MOST_RENDERED_PIXELS = 25_000_000
_MOST_BAD_PAGES_IN_A_ROW = 20
_LONGEST_FACT = 1000
_PASSWORD_ERRORS = (4, 5)  # FPDF_ERR_PASSWORD and FPDF_ERR_SECURITY in fpdfview.h


def extract_pdf(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose with a mark for every page that has text.

    A file that is too long for one document becomes several, one after the other. Metadata: ``title``, ``author``,
    ``pages``, and counts of what was recognised, written as tables or left out. Raises `ExtractionError`:
    ``encrypted`` when it needs a password, ``damaged`` when it cannot be opened, ``empty`` when no page shows
    anything. A page that cannot be read is refused, and the others go on.
    """
    with content.open() as file, closing(_opened(file)) as document:
        gathering = Gathering(context.config, {**_facts(document), "pages": str(len(document))})
        is_silent = True
        for item in _pages(document, context):
            found = [item] if isinstance(item, Refused) else gathering.add(item)
            for answer in found:
                is_silent = False
                yield answer
        for answer in gathering.document():
            is_silent = False
            yield answer
    if is_silent:
        raise ExtractionError("empty", "no page shows any text")


def _opened(file: BinaryIO) -> PdfDocument:
    import pypdfium2

    logging.getLogger("pypdfium2").setLevel(logging.CRITICAL)
    try:
        return pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if error.err_code in _PASSWORD_ERRORS:
            raise ExtractionError("encrypted", "it needs a password") from None
        raise ExtractionError("damaged", "it cannot be opened as a PDF") from None


def _facts(document: PdfDocument) -> Mapping[str, str]:
    """What the file says of itself, each value on one line."""
    stated = document.get_metadata_dict(skip_empty=True)
    facts = {name.lower(): "".join(filter(str.isprintable, stated.get(name, ""))) for name in ("Title", "Author")}
    return {name: value.strip() for name, value in facts.items() if value.strip() and len(value) <= _LONGEST_FACT}


def _pages(document: PdfDocument, context: Context) -> Iterator[Page | Refused]:
    import pypdfium2

    reader = _Reader(context.config)
    bad = 0
    for index in range(len(document)):
        context.alive()
        try:
            page = document[index]
            try:
                yield from reader.read(page, index)
            finally:
                page.close()
            bad = 0
        except pypdfium2.PdfiumError:
            yield Refused(f"page {index + 1}", "damaged", "it cannot be read")
            bad += 1
            if bad == _MOST_BAD_PAGES_IN_A_ROW:
                raise ExtractionError("damaged", f"{bad} pages in a row cannot be read") from None


class _Reader:
    """Reads pages as text where they hold text, else as pictures."""

    def __init__(self, config: ExtractConfig) -> None:
        self._config = config
        self._has_engine = True

    def read(self, page: PdfPage, index: int) -> Iterator[Page | Refused]:
        words, objects = read_words(page), page_objects(page)
        if not _is_picture(words, objects):
            if words.words:
                yield self._text(words, objects, index)
            return
        recognised = self._recognised(page, objects, index, words.letters)
        if isinstance(recognised, Refused) or recognised is None:
            if words.words:
                yield self._text(words, objects, index)
        else:
            yield recognised
        if isinstance(recognised, Refused):
            yield recognised

    def _text(self, words: PageWords, objects: PageObjects, index: int) -> Page:
        tables: list[Line] = []
        rest, is_unsearched = words, objects.has_more
        if self._config.pdf_tables and objects.may_hold_tables:
            try:
                tables, rest = find_tables(words, objects)
            except TooManyLinesError:
                is_unsearched = True
        lines, others = lines_of(rest)
        return Page(
            index + 1,
            words.width if words.turns % 2 else words.height,
            [*lines, *tables],
            others,
            tables=len(tables),
            meaningless=words.meaningless,
            is_unsearched=is_unsearched and self._config.pdf_tables,
        )

    def _recognised(self, page: PdfPage, objects: PageObjects, index: int, known: int) -> Page | Refused | None:
        """The page as recognition reads it, None when that finds less than the `known` letters of its text."""
        place = f"page {index + 1}"
        if not self._config.ocr:
            return Refused(place, "unsupported", "it shows a picture, and data.extract.ocr is off")
        if objects.has_more:
            return Refused(place, "oversized", "it is a drawing with too many parts to search for text")
        if self._has_engine:
            try:
                found = recognise(render(page, _MOST_RENDERED_PIXELS), self._config)
            except ImportError:
                self._has_engine = False
            except ExtractionError as error:
                return Refused(place, error.reason, error.detail)
        if not self._has_engine:
            return Refused(place, "not_installed", "it shows a picture; to read pictures, install sheepop[ocr]")
        letters = sum(sum(map(str.isalnum, line.text)) for line in found.lines)
        if letters <= known:
            return None if known else Refused(place, "empty", "no text was recognised in it")
        return Page(index + 1, found.height, found.lines, confidence=found.confidence, unsure=found.unsure)


def _is_picture(words: PageWords, objects: PageObjects) -> bool:
    """Whether the text on a page, if any, is not what the page shows."""
    letters = words.letters
    if words.meaningless > _MEANINGLESS_SHARE * (words.meaningless + letters):
        return True
    if letters == 0:
        return not objects.is_blank
    return letters < _FEW_LETTERS and objects.pictures >= _PICTURE_SHARE
