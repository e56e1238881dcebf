"""What stands on a PDF page beside its text: ruling lines and pictures; and the page as a picture."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sheepop.data.extract.pdf_words import Box, PageFrame

if TYPE_CHECKING:
    from PIL.Image import Image
    from pypdfium2 import PdfMatrix, PdfPage

# With more than this a page is a drawing; looking further would take long and tell nothing.
_MOST_OBJECTS = 20_000
_MOST_SEGMENTS = 12_000
_DEEPEST_FORM = 5
# Points: how far a ruling line may be off its direction, and the shortest that counts.
_STRAY = 1.0
_SHORTEST = 3.0
# Points to pixels: text of 10 points is then 25 pixels high.
_PIXELS_PER_POINT = 2.5
_LONGEST_SIDE = 20_000


@dataclass(slots=True)
class PageObjects:
    """What a page shows beside text: straight lines across and down, and the share of its area under pictures.

    `shapes` counts everything else that is drawn. `has_more` says that not all objects were looked at.
    """

    across: list[Box] = field(default_factory=list)
    down: list[Box] = field(default_factory=list)
    pictures: float = 0.0
    shapes: int = 0
    has_more: bool = False

    @property
    def may_hold_tables(self) -> bool:
        """Whether the lines suffice for a table."""
        return not self.has_more and len(self.across) >= 3 and len(self.down) >= 3

    @property
    def is_blank(self) -> bool:
        """Whether nothing but text is drawn."""
        return self.shapes == 0 and self.pictures == 0


def page_objects(page: PdfPage) -> PageObjects:
    """Looks at the objects of a page without drawing them."""
    return _Survey(page).found


def render(page: PdfPage, max_pixels: int) -> Image:
    """The page as a grey picture of at most `max_pixels`, however large the page is."""
    width, height = page.get_size()
    scale = min(_PIXELS_PER_POINT, math.sqrt(max_pixels / max(width * height, 1.0)), _LONGEST_SIDE / max(width, height))
    return page.render(scale=scale, grayscale=True).to_pil()


class _Survey:
    def __init__(self, page: PdfPage) -> None:
        import pypdfium2
        import pypdfium2.raw as pdfium

        self._pdfium, self._matrix_type = pdfium, pypdfium2.PdfMatrix
        self._frame = PageFrame.of(page)
        self._area = max(self._frame.width * self._frame.height, 1.0)
        self._seen = self._segments = 0
        self._x, self._y, self._raw_matrix = ctypes.c_float(), ctypes.c_float(), pdfium.FS_MATRIX()
        self._fill, self._stroke = ctypes.c_int(), ctypes.c_int()
        self.found = PageObjects()
        self._look(page.raw, pdfium.FPDFPage_CountObjects, pdfium.FPDFPage_GetObject, self._matrix_type(), 0)

    def _look(self, parent: Any, count: Any, get: Any, outer: PdfMatrix, depth: int) -> None:
        pdfium = self._pdfium
        for index in range(count(parent)):
            self._seen += 1
            if self._seen > _MOST_OBJECTS or self._segments > _MOST_SEGMENTS:
                self.found.has_more = True
                return
            item = get(parent, index)
            kind = pdfium.FPDFPageObj_GetType(item)
            if kind == pdfium.FPDF_PAGEOBJ_PATH:
                self._path(item, outer)
            elif kind == pdfium.FPDF_PAGEOBJ_IMAGE:
                inner = self._matrix(item).multiply(outer)
                self.found.pictures += abs(inner.a * inner.d - inner.b * inner.c) / self._area
            elif kind == pdfium.FPDF_PAGEOBJ_FORM and depth < _DEEPEST_FORM:
                inner = self._matrix(item).multiply(outer)
                self._look(item, pdfium.FPDFFormObj_CountObjects, pdfium.FPDFFormObj_GetObject, inner, depth + 1)
            elif kind != pdfium.FPDF_PAGEOBJ_TEXT:
                self.found.shapes += 1

    def _matrix(self, item: Any) -> PdfMatrix:
        raw = self._raw_matrix
        is_known = self._pdfium.FPDFPageObj_GetMatrix(item, raw)
        return self._matrix_type.from_raw(raw) if is_known else self._matrix_type()

    def _path(self, item: Any, outer: PdfMatrix) -> None:
        """Notes the straight lines of a path that is drawn."""
        pdfium = self._pdfium
        self._fill.value, self._stroke.value = 0, 0
        pdfium.FPDFPath_GetDrawMode(item, self._fill, self._stroke)
        if not (self._fill.value or self._stroke.value):
            return
        self.found.shapes += 1
        matrix = self._matrix(item).multiply(outer)
        count = pdfium.FPDFPath_CountSegments(item)
        self._segments += count
        start = point = (0.0, 0.0)
        for index in range(min(count, _MOST_SEGMENTS)):
            segment = pdfium.FPDFPath_GetPathSegment(item, index)
            pdfium.FPDFPathSegment_GetPoint(segment, self._x, self._y)
            before, point = point, matrix.on_point(self._x.value, self._y.value)
            kind = pdfium.FPDFPathSegment_GetType(segment)
            if kind == pdfium.FPDF_SEGMENT_MOVETO:
                start = point
            elif kind == pdfium.FPDF_SEGMENT_LINETO:
                self._note(before, point)
            if pdfium.FPDFPathSegment_GetClose(segment):
                self._note(point, start)

    def _note(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        (x0, y0), (x1, y1) = begin, end
        left, top, right, bottom = self._frame.shown(min(x0, x1), max(y0, y1), max(x0, x1), min(y0, y1))
        if bottom - top <= _STRAY and right - left >= _SHORTEST:
            self.found.across.append(Box(left, top, right, bottom))
        elif right - left <= _STRAY and bottom - top >= _SHORTEST:
            self.found.down.append(Box(left, top, right, bottom))
