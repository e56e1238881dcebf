"""Extracts text from PDF files in reading order, with tables as Markdown, and recognises text on scanned pages."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, BinaryIO

import pypdfium2
import pypdfium2.raw as pdfium

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError, Refused, Span, cut_units
from sheepop.data.extract.page_lines import Line, Page
from sheepop.data.extract.paged_text import documents
from sheepop.data.extract.pdf_forms import Box, PageFrame, Word
from sheepop.data.extract.pdf_words import PageWords, lines_of, read_words

if TYPE_CHECKING:
    from PIL.Image import Image

# A page with fewer letters than this, and pictures on at least this share of its area, is a scan with a stamp.
_FEW_LETTERS = 200
_PICTURE_SHARE = 0.5
# If a larger share of the characters has no known meaning, the font hides the text.
_MEANINGLESS_SHARE = 0.3
_MOST_BAD_PAGES_IN_A_ROW = 20
_LONGEST_FACT = 1000
# A shorter document is not cut into spans.
_LEAST_PAGES = 200
_PASSWORD_ERRORS = (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY)
# A page with more objects or segments is a drawing; looking further would take long and find nothing.
_MOST_OBJECTS = 20_000
_MOST_SEGMENTS = 12_000
_DEEPEST_FORM = 5
# A table has at least this many ruling lines in each direction. In points: how far such a line may deviate from its
# direction, and its least length.
_LEAST_RULES = 3
_STRAY = 1.0
_SHORTEST = 3.0
# Points to pixels: text of 10 points is then 25 pixels high.
_PIXELS_PER_POINT = 2.5
_MOST_RENDERED_PIXELS = 25_000_000
_LONGEST_SIDE = 20_000


def extract_pdf(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark for each page that has text, or several if it is too long.

    Metadata: ``title``, ``author``, ``pages``, and counts such as recognised pages, tables and removed running lines.
    Raises `ExtractionError`: ``encrypted``, ``damaged`` if it cannot be opened, ``empty`` if no page shows text.
    """
    item = None
    with content.open() as file, closing(_opened(file)) as document:
        facts = {**_facts(document), "pages": str(len(document))}
        span = content.span
        numbers = range(span.begin, span.end) if span else range(len(document))
        for item in documents(_pages(document, numbers, context), facts, context.config, is_whole=span is None):
            yield item
    if item is None:
        raise ExtractionError("empty", "no page shows any text")


def cut_pdf(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of pages, each as long as a long book at least; see `Cutter`."""
    with content.open() as file, closing(_opened(file)) as document:
        pages = len(document)
    page_bytes = max(1, content.size // max(1, pages))
    yield from cut_units(repeat(page_bytes, pages), max(part_bytes, _LEAST_PAGES * page_bytes), "pages")


def _opened(file: BinaryIO) -> pypdfium2.PdfDocument:
    logging.getLogger("pypdfium2").setLevel(logging.CRITICAL)
    try:
        document = pypdfium2.PdfDocument(file)
        document.init_forms()
        return document
    except pypdfium2.PdfiumError as error:
        if error.err_code in _PASSWORD_ERRORS:
            raise ExtractionError("encrypted", "it needs a password") from None
        raise ExtractionError("damaged", "it cannot be opened as a PDF") from None


def _facts(document: pypdfium2.PdfDocument) -> Mapping[str, str]:
    """Returns the title and author that the file states, each on one line."""
    stated = document.get_metadata_dict(skip_empty=True)
    facts = {name.lower(): "".join(filter(str.isprintable, stated.get(name, ""))) for name in ("Title", "Author")}
    return {name: value.strip() for name, value in facts.items() if value.strip() and len(value) <= _LONGEST_FACT}


def _pages(document: pypdfium2.PdfDocument, numbers: range, context: Context) -> Iterator[Page | Refused]:
    bad = 0
    for index in numbers:
        context.alive()
        try:
            with closing(document[index]) as page:
                yield from _read(page, index + 1, context.config)
            bad = 0
        except pypdfium2.PdfiumError:
            yield Refused(f"page {index + 1}", "damaged", "it cannot be read")
            bad += 1
            if bad == _MOST_BAD_PAGES_IN_A_ROW:
                raise ExtractionError("damaged", f"{bad} pages in a row cannot be read") from None


def _read(page: pypdfium2.PdfPage, number: int, config: ExtractConfig) -> Iterator[Page | Refused]:
    """Yields the page from its text, or by recognition if the page shows more than its text; or why that failed."""
    words = read_words(page)
    objects = _objects_of(page, words.frame)
    letters = _letters(words.words)
    is_picture = (
        words.meaningless > _MEANINGLESS_SHARE * (words.meaningless + letters)
        or (letters == 0 and objects.shapes + objects.pictures > 0)
        or (0 < letters < _FEW_LETTERS and objects.pictures >= _PICTURE_SHARE)
    )
    recognised = _recognised(page, objects, number, letters, config) if is_picture else None
    if words.words and not isinstance(recognised, Page):
        yield _text(words, objects, number, config)
    if recognised is not None:
        yield recognised


def _text(words: PageWords, objects: _Objects, number: int, config: ExtractConfig) -> Page:
    tables: list[Line] = []
    rest, is_unsearched = words.words, config.pdf_tables and objects.has_more
    if config.pdf_tables and not objects.has_more and min(len(objects.across), len(objects.down)) >= _LEAST_RULES:
        from sheepop.data.extract.pdf_tables import TooManyLinesError, find_tables

        try:
            tables, rest = find_tables(rest, objects.across, objects.down)
        except TooManyLinesError:
            is_unsearched = True
    lines, others = lines_of(rest, words.frame)
    height = words.frame.size[1]
    return Page(number, height, [*lines, *tables], others, len(tables), words.meaningless, is_unsearched)


def _recognised(
    page: pypdfium2.PdfPage, objects: _Objects, number: int, known: int, config: ExtractConfig
) -> Page | Refused | None:
    """Returns the recognised page, or a refusal; None if recognition finds no more letters than the `known` ones."""
    place = f"page {number}"
    if not config.ocr:
        return Refused(place, "unsupported", "it shows a picture, and data.extract.ocr is off")
    if objects.has_more:
        return Refused(place, "oversized", "it is a drawing with too many parts to search for text")
    try:
        from sheepop.data.extract.image import engine, recognise

        engine(config.ocr_threads)  # raises before the page is rendered if rapidocr is missing
        found = recognise(render(page, _MOST_RENDERED_PIXELS), config, number)
    except ImportError:
        return Refused(place, "not_installed", "it shows a picture; to read pictures, install sheepop[ocr]")
    except ExtractionError as error:
        return Refused(place, error.reason, error.detail)
    if _letters(found.lines) > known:
        return found
    return None if known else Refused(place, "empty", "no text was recognised in it")


def _letters(pieces: Iterable[Word | Line]) -> int:
    """Returns the number of letters and digits."""
    return sum(sum(map(str.isalnum, piece.text)) for piece in pieces)


def render(page: pypdfium2.PdfPage, max_pixels: int) -> Image:
    """Renders a page of any size as a grey picture of at most `max_pixels`."""
    width, height = page.get_size()
    scale = min(_PIXELS_PER_POINT, math.sqrt(max_pixels / max(width * height, 1.0)), _LONGEST_SIDE / max(width, height))
    return page.render(scale=scale, grayscale=True).to_pil()


@dataclass(slots=True)
class _Objects:
    """What a page shows besides text: horizontal and vertical lines, and the share of its area under pictures.

    `shapes` counts all drawn objects that are not pictures. `has_more` says that not all objects were examined.
    """

    across: list[Box] = field(default_factory=list)
    down: list[Box] = field(default_factory=list)
    pictures: float = 0.0
    shapes: int = 0
    has_more: bool = False


def _objects_of(page: pypdfium2.PdfPage, frame: PageFrame) -> _Objects:
    """Examines the objects of a page without rendering them; `frame` converts the positions of lines."""
    found = _Objects()
    seen = segments = 0
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    parents = [(page.raw, pdfium.FPDFPage_CountObjects, pdfium.FPDFPage_GetObject, pypdfium2.PdfMatrix(), 0)]
    for parent, count, get, outer, depth in parents:
        for index in range(count(parent)):
            seen += 1
            if seen > _MOST_OBJECTS or segments > _MOST_SEGMENTS:
                found.has_more = True
                return found
            item = get(parent, index)
            kind = pdfium.FPDFPageObj_GetType(item)
            if kind == pdfium.FPDF_PAGEOBJ_TEXT:
                continue
            own = pdfium.FS_MATRIX(1, 0, 0, 1, 0, 0)  # unchanged for an object without a matrix
            pdfium.FPDFPageObj_GetMatrix(item, own)
            matrix = pypdfium2.PdfMatrix.from_raw(own).multiply(outer)
            if kind == pdfium.FPDF_PAGEOBJ_IMAGE:
                found.pictures += abs(matrix.a * matrix.d - matrix.b * matrix.c) / max(frame.width * frame.height, 1.0)
            elif kind == pdfium.FPDF_PAGEOBJ_FORM and depth < _DEEPEST_FORM:
                inside = pdfium.FPDFFormObj_CountObjects, pdfium.FPDFFormObj_GetObject
                parents.append((item, *inside, matrix, depth + 1))
            elif kind != pdfium.FPDF_PAGEOBJ_PATH or (
                pdfium.FPDFPath_GetDrawMode(item, fill, stroke) and (fill.value or stroke.value)
            ):
                found.shapes += 1
                segments += max(0, pdfium.FPDFPath_CountSegments(item))
                for (x0, y0), (x1, y1) in _sides(item, matrix):
                    box = frame.placed(min(x0, x1), max(y0, y1), max(x0, x1), min(y0, y1))
                    if box.bottom - box.top <= _STRAY and box.right - box.left >= _SHORTEST:
                        found.across.append(box)
                    elif box.right - box.left <= _STRAY and box.bottom - box.top >= _SHORTEST:
                        found.down.append(box)
    return found


def _sides(path: Any, matrix: pypdfium2.PdfMatrix) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yields the two ends, on the page, of each straight line of a path; nothing for other objects."""
    x, y = ctypes.c_float(), ctypes.c_float()
    start = point = (0.0, 0.0)
    for index in range(min(pdfium.FPDFPath_CountSegments(path), _MOST_SEGMENTS)):
        segment = pdfium.FPDFPath_GetPathSegment(path, index)
        pdfium.FPDFPathSegment_GetPoint(segment, x, y)
        before, point = point, matrix.on_point(x.value, y.value)
        kind = pdfium.FPDFPathSegment_GetType(segment)
        if kind == pdfium.FPDF_SEGMENT_MOVETO:
            start = point
        elif kind == pdfium.FPDF_SEGMENT_LINETO:
            yield before, point
        if pdfium.FPDFPathSegment_GetClose(segment):
            yield point, start
