"""Words placed on a PDF page, and what is filled into it: values of form fields, and text and notes over the page."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

_INVISIBLE = pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW
_VALUES = (pdfium.FPDF_FORMFIELD_TEXTFIELD, pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX)
_CHECKED = (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON)
_PASSWORD = 1 << 13  # ISO 32000-2, table 230
_MOST_ANNOTATIONS = 5000
# In points; and the distance between lines, and the part of a line below the letters, in multiples of the size.
_LARGEST_SIZE, _SIZE_SHARE = 12.0, 0.7
_PITCH, _DESCENT = 1.2, 0.25
# The gap after a label, and how far its baseline may be from that of the field, in multiples of the size.
_BLANK, _STRAY = 0.3, 0.6
# A shorter text may be printed elsewhere on the page by chance.
_LEAST_PRINTED = 8


class Box(NamedTuple):
    """A rectangle on a page: points from its upper left corner, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def turned(self, turns: int, width: float, height: float) -> Box:
        """Returns the box after this many clockwise quarter turns of a page of this width and height."""
        left, top, right, bottom = self
        for _ in range(turns % 4):
            left, top, right, bottom = height - bottom, left, height - top, right
            width, height = height, width
        return Box(left, top, right, bottom)


class PageFrame(NamedTuple):
    """Converts coordinates of the file (y upwards) to the page, of `width` x `height` before its clockwise `turns`."""

    left: float
    top: float
    width: float
    height: float
    turns: int

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the turned page."""
        return (self.height, self.width) if self.turns % 2 else (self.width, self.height)

    def placed(self, left: float, top: float, right: float, bottom: float) -> Box:
        """Returns the box on the turned page of a rectangle with these edges in the file."""
        place = Box(left - self.left, self.top - top, right - self.left, self.top - bottom)
        return place.turned(self.turns, self.width, self.height) if self.turns else place


class Word(NamedTuple):
    """A word, its box, the size of its letters in points; `line` is the number of its line according to pdfium.

    `turns` is the number of clockwise quarter turns of the page that make it readable, None if it is slanted. Its
    baseline is `descent` points above the lower edge of the box in that orientation.
    """

    text: str
    box: Box
    size: float
    line: int
    turns: int | None
    descent: float


def with_filled_in(words: list[Word], page: pypdfium2.PdfPage, frame: PageFrame) -> list[Word]:
    """Returns the words with a word for each line of text that is filled in and not printed as well.

    It follows the words to the left of it. Boxes to tick are `[x]` and `[ ]`.
    """
    printed = "".join(word.text for word in words)
    number = 1 + max((word.line for word in words), default=0)
    for filled in _filled_in(page, frame, number):
        if len(text := "".join(filled.text.split())) < _LEAST_PRINTED or text not in printed:
            labels = [at for at, word in enumerate(words) if _is_label(word, filled)]
            at = max(labels, key=lambda at: words[at].box.right, default=len(words) - 1)
            if labels:
                left = words[at].box.right + _BLANK * filled.size
                box = filled.box._replace(left=left, right=max(left + 1, filled.box.right))
                filled = filled._replace(box=box, line=words[at].line)
            words.insert(at + 1, filled)
    return words


def _is_label(word: Word, filled: Word) -> bool:
    """Returns whether a word is to the left of what is filled in, on the same line."""
    stray = abs(word.box.bottom - word.descent - filled.box.bottom + filled.descent)
    return word.turns == 0 and word.box.right <= filled.box.left + filled.size and stray <= _STRAY * filled.size


def _filled_in(page: pypdfium2.PdfPage, frame: PageFrame, line: int) -> Iterator[Word]:
    """Yields a word for each line of text that is filled in, with line numbers from `line`."""
    form = page.formenv.raw if page.formenv is not None else None
    for index in range(min(pdfium.FPDFPage_GetAnnotCount(page.raw), _MOST_ANNOTATIONS)):
        annotation = pdfium.FPDFPage_GetAnnot(page.raw, index)
        try:
            if pdfium.FPDFAnnot_GetFlags(annotation) & _INVISIBLE:
                continue
            lines = _text(annotation, form).replace("\r\n", "\n").replace("\r", "\n").split("\n")
            place = pdfium.FS_RECTF()
            pdfium.FPDFAnnot_GetRect(annotation, place)
        finally:
            pdfium.FPDFPage_CloseAnnot(annotation)
        for word in _placed(lines, place, frame, line):
            yield word
            line = word.line + 1


def _text(annotation: Any, form: Any) -> str:
    kind = pdfium.FPDFAnnot_GetSubtype(annotation)
    if kind in (pdfium.FPDF_ANNOT_FREETEXT, pdfium.FPDF_ANNOT_TEXT):
        return _string(lambda *buffer: pdfium.FPDFAnnot_GetStringValue(annotation, b"Contents", *buffer))
    if kind != pdfium.FPDF_ANNOT_WIDGET or form is None:
        return ""
    field = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    if field in _CHECKED:
        return "[x]" if pdfium.FPDFAnnot_IsChecked(form, annotation) else "[ ]"
    is_secret = pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation) & _PASSWORD
    if field not in _VALUES or (field == pdfium.FPDF_FORMFIELD_TEXTFIELD and is_secret):
        return ""
    return _string(lambda *buffer: pdfium.FPDFAnnot_GetFormFieldValue(form, annotation, *buffer))


def _string(get: Callable[..., int]) -> str:
    """Returns the text that a function of pdfium writes to a buffer as UTF-16 with a NUL."""
    size = get(None, 0)
    buffer = ctypes.create_string_buffer(max(size, 2))
    get(ctypes.cast(buffer, ctypes.POINTER(pdfium.FPDF_WCHAR)), size)
    return buffer.raw[: max(size - 2, 0)].decode("utf-16-le", "replace")


def _placed(lines: list[str], place: Any, frame: PageFrame, number: int) -> Iterator[Word]:
    """Yields the lines that have text from the top of the rectangle on, and in the middle of it if there is one."""
    low, high = sorted((place.bottom, place.top))
    size = max(1.0, min(_LARGEST_SIZE, _SIZE_SHARE * (high - low)))
    baseline = low + (high - low - size) / 2 if len(lines) == 1 else high - size
    for text in lines:
        if text := " ".join("".join(char if char.isprintable() else " " for char in text).split()):
            box = frame.placed(place.left, baseline + (1 - _DESCENT) * size, place.right, baseline - _DESCENT * size)
            yield Word(text, box, size, number, 0, _DESCENT * size)
            number += 1
        baseline -= _PITCH * size
