"""Reads the words of a PDF page and their positions from the characters that pdfium finds."""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from sheepop.data.extract.page_lines import RIGHT_TO_LEFT, WIDE_GAP, Glyph, Line, runs, visual_pieces
from sheepop.data.extract.pdf_forms import Box, PageFrame, Word, with_filled_in

# pdfium's mark for a hyphen that divides a word at the end of a line: U+FFFE in its text, U+0002 in its characters.
_WORD = re.compile("[^\\s\x02\ufffe]+[\x02\ufffe]?|[\x02\ufffe]")
_LINE = re.compile("[^\r\n\x02\ufffe]+[\x02\ufffe]?|[\x02\ufffe]")
_CHARACTER = re.compile("[\ud800-\udbff][\udc00-\udfff]|.")
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u200b\u2060\ufeff\ufff0-\uffff\ufdd0-\ufdef]")
_WITHOUT_MEANING = re.compile("[\x00\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff]")
# Scripts that are also written in columns from top to bottom.
_EAST_ASIAN = re.compile("[\u2e80-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")
_LAM, _ALEFS = "\u0644", "\u0622\u0623\u0625\u0627\u0671"
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPELT_OUT = str.maketrans(
    {"\x02": "-", "\ufffe": "-"}
    | {"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st"}
    # Bullets of the Symbol and Wingdings fonts.
    | {"\uf0b7": "\u2022", "\uf0a7": "\u25aa", "\uf0d8": "\u27a2", "\uf0fc": "\u2713"}
)
# How far letters reach above and below the baseline, in multiples of their size.
_ASCENT, _DESCENT = 0.75, 0.25
_LARGEST_SKEW = math.radians(5)
# Letters that are printed twice to look bold are closer than this to each other, in multiples of their size.
_OVERPRINT = 0.2
# In a column that is read from top to bottom, the largest gap between letters, and how far they may be off the line.
_COLUMN_GAP, _COLUMN_STRAY = 0.5, 0.3
_LEAST_COLUMN = 3


class PageWords(NamedTuple):
    """The words in the order of the file, on the page as `frame` turns it, and the number of unknown characters."""

    words: list[Word]
    frame: PageFrame
    meaningless: int


def read_words(page: pypdfium2.PdfPage) -> PageWords:
    """Reads the words of a page, with what is filled into it; raises `pypdfium2.PdfiumError` if it cannot be read."""
    with closing(page.get_textpage()) as text_page:
        reader = _Reader(page, text_page.raw)
        words = list(_columns(_printed_once(reader.words())))
        words = with_filled_in(words, page, reader.frame)
    return PageWords(*_turned(words, reader.frame), reader.meaningless)


def _turned(words: list[Word], frame: PageFrame) -> tuple[list[Word], PageFrame]:
    """Returns the words and the frame of a page after turning it so that most letters can be read."""
    letters: Counter[int] = Counter()
    for word in words:
        if word.turns is not None:
            letters[word.turns] += len(word.text)
    turns = min(letters, key=lambda turns: (-letters[turns], turns), default=0)
    if turns == 0:
        return words, frame
    boxes = [word.box.turned(turns, *frame.size) for word in words]
    rests = [None if word.turns is None else (word.turns - turns) % 4 for word in words]
    turned = [word._replace(box=box, turns=rest) for word, box, rest in zip(words, boxes, rests, strict=True)]
    return turned, frame._replace(turns=(frame.turns + turns) % 4)


def lines_of(words: list[Word], frame: PageFrame) -> tuple[list[Line], list[Line]]:
    """Returns the lines that these words form, and the lines in other directions, for example in a margin."""
    words, _ = _turned(words, frame)
    pieces = [(piece[0].turns == 0, _line(piece)) for piece in runs(words, _continues)]
    return [line for is_upright, line in pieces if is_upright], [line for is_upright, line in pieces if not is_upright]


def _continues(piece: list[Word], word: Word) -> bool:
    """Returns whether a word is on the line of a piece, without a wide gap between them."""
    before = piece[-1]
    begin, end = (1, 3) if word.turns in (1, 3) else (0, 2)
    gap = max(word.box[begin] - before.box[end], before.box[begin] - word.box[end])
    return before.line == word.line and before.turns == word.turns and gap <= WIDE_GAP * word.size


def _line(piece: list[Word]) -> Line:
    text = " ".join(word.text for word in piece)
    # The median size: capitals and superscripts often have other sizes.
    size = sorted(word.size for word in piece for _ in word.text)[len(text) // 2 - len(piece) // 2]
    usual = next(word for word in piece if word.size == size)
    baseline = usual.box.bottom - usual.descent
    first = piece[0].text.split(" ", 1)[0]  # a right-to-left piece may contain several words
    first_width = (piece[0].box.right - piece[0].box.left) * len(first) / len(piece[0].text)
    left, right = min(word.box.left for word in piece), max(word.box.right for word in piece)
    return Line(text, left, baseline - _ASCENT * size, right, baseline + _DESCENT * size, size, first_width)


class _Style(NamedTuple):
    """The style of letters: the fields of `Word`, their quarter turns in the file, and the breadth of their line."""

    size: float
    turns: int | None
    descent: float
    quarters: int
    breadth: float


class _Reader:
    """Reads one page. Calls into pdfium take most of the time, so it requests two boxes a word and little else."""

    def __init__(self, page: pypdfium2.PdfPage, text_page: Any) -> None:
        left, bottom, right, top = page.get_bbox()
        self.frame = PageFrame(left, top, right - left, top - bottom, page.get_rotation() // 90)
        self._page, self.meaningless = text_page, 0
        self._rectangle, self._matrix = pdfium.FS_RECTF(), pdfium.FS_MATRIX()
        self._into_rectangle = ctypes.byref(self._rectangle)
        self._x, self._y = ctypes.c_double(), ctypes.c_double()

    def words(self) -> Iterator[Word]:
        """Yields the words, with positions on the page as it is displayed."""
        text = self._text()
        for number, span in enumerate(_LINE.finditer(text)):
            read = self._from_right if RIGHT_TO_LEFT.search(span.group()) else self._from_left
            words = list(read(text, span.start(), span.end(), number))
            if all(word.turns == 2 for word in words):
                # pdfium gives pieces that were drawn one by one from left to right, also if they are upside down.
                words.sort(key=lambda word: -word.box.right)
            yield from words

    def _text(self) -> str:
        """Returns the characters of the page, one for each that pdfium counts; a surrogate pair counts as two."""
        count = max(0, pdfium.FPDFText_CountChars(self._page))
        buffer = (ctypes.c_ushort * (count + 1))()
        if pdfium.FPDFText_GetText(self._page, 0, count, buffer) == count + 1:
            return "".join(map(chr, buffer[:count]))
        get = pdfium.FPDFText_GetUnicode
        return "".join(chr(min(get(self._page, index), 0x10FFFF)) for index in range(count))

    def _from_left(self, text: str, begin: int, end: int, line: int) -> Iterator[Word]:
        style: _Style | None = None
        for match in _WORD.finditer(text, begin, end):
            word = self._meaningful(match.group())
            if word:
                box = self._box(match.start())
                style = self._style(match.start(), box, style)
                if len(match.group()) > 1:
                    last = self._box(match.end() - 1)
                    left, bottom = min(box.left, last.left), min(box.bottom, last.bottom)
                    box = Box(left, max(box.top, last.top), max(box.right, last.right), bottom)
                yield Word(word, self.frame.placed(*box), style.size, line, style.turns, style.descent)

    def _from_right(self, text: str, begin: int, end: int, line: int) -> Iterator[Word]:
        """Yields the pieces of a line with right-to-left text, each as one word."""
        glyphs: list[Glyph] = []
        first = self._box(begin)
        style = self._style(begin, first, None)
        for match in _CHARACTER.finditer(text, begin, end):
            character = self._meaningful(match.group())
            if character:
                box = self._box(match.start())
                glyphs.append(Glyph(character, box.left, box.right))
                if character == _LAM and len(glyphs) > 1 and _is_ligature(*glyphs[-2:]):
                    # pdfium gives the two letters of one glyph from left to right.
                    glyphs[-2:] = reversed(glyphs[-2:])
        for piece in visual_pieces(glyphs, style.size):
            box = self.frame.placed(piece.left, first.top, piece.right, first.bottom)
            yield Word(piece.character, box, style.size, line, style.turns, style.descent)

    def _meaningful(self, text: str) -> str:
        """Returns the text without characters that have no meaning, and counts these."""
        if text.isascii() and text.isprintable():
            return text
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        text, count = _WITHOUT_MEANING.subn("", text.translate(_SPELT_OUT))
        self.meaningless += count
        return _NO_TEXT.sub("", text)

    def _box(self, index: int) -> Box:
        """Returns the box of a character in the coordinates of the file, where y grows upwards."""
        pdfium.FPDFText_GetLooseCharBox(self._page, index, self._into_rectangle)
        found = self._rectangle
        return Box(found.left, found.top, found.right, found.bottom)

    def _style(self, index: int, box: Box, known: _Style | None) -> _Style:
        """Returns the style of a character; characters on one line whose boxes are equally broad share a style."""
        height, width = box.top - box.bottom, box.right - box.left
        if known is not None and abs((height, width)[known.quarters % 2] - known.breadth) < 1e-3:
            return known
        matrix = self._matrix
        pdfium.FPDFText_GetMatrix(self._page, index, matrix)
        pdfium.FPDFText_GetCharOrigin(self._page, index, self._x, self._y)
        nominal = pdfium.FPDFText_GetFontSize(self._page, index)
        size = abs(nominal) * math.hypot(matrix.c, matrix.d) or max(min(height, width), 1.0)
        angle = math.atan2(matrix.b, matrix.a)
        quarters = round(angle / (math.pi / 2))
        if abs(angle - quarters * math.pi / 2) > _LARGEST_SKEW:
            return _Style(size, None, 0.0, quarters, math.nan)
        x, y = self._x.value, self._y.value
        descent = (y - box.bottom, box.right - x, box.top - y, x - box.left)[quarters % 4]
        return _Style(size, (quarters - self.frame.turns) % 4, descent, quarters, (height, width)[quarters % 2])


def _is_ligature(alef: Glyph, lam: Glyph) -> bool:
    """Returns whether a form of alef shares the glyph of a lam."""
    return alef.character in _ALEFS and (alef.left, alef.right) == (lam.left, lam.right)


def _printed_once(words: Iterable[Word]) -> list[Word]:
    """Returns the words without repetitions at about the same place, with which programs imitate bold fonts."""
    kept: list[Word] = []
    places: set[tuple[str, float, float, float]] = set()
    for word in words:
        size = round(word.size, 1) or 1.0
        across, down = (edge // (_OVERPRINT / 2 * size) for edge in word.box[:2])
        if not any((word.text, size, across + x, down + y) in places for x in (-1, 0, 1) for y in (-1, 0, 1)):
            kept.append(word)
        places.add((word.text, size, across, down))
    return kept


def _columns(words: list[Word]) -> Iterator[Word]:
    """Yields the words, with each column of upright letters, as in vertical Japanese, joined to one word.

    Such a word gets `turns` of 3: with the page turned to the left, the columns from right to left are lines.
    """
    for column in runs(words, _is_below):
        text = "".join(part.text for part in column)
        if len(text) < _LEAST_COLUMN or not all(map(_is_upright, column)):
            yield from column
        else:
            boxes = [part.box for part in column]
            place = Box(boxes[0].left, boxes[0].top, max(box.right for box in boxes), boxes[-1].bottom)
            yield column[0]._replace(text=text, box=place, turns=3, descent=_DESCENT * column[0].size)


def _is_below(column: list[Word], word: Word) -> bool:
    before = column[-1]
    reach = _COLUMN_STRAY * before.size
    gap, stray = word.box.top - before.box.bottom, abs(word.box.left - before.box.left)
    is_near = stray <= reach and -reach <= gap <= _COLUMN_GAP * before.size
    return is_near and _is_upright(before) and _is_upright(word)


def _is_upright(word: Word) -> bool:
    """Returns whether a word is one East Asian letter, or several below each other."""
    if word.turns != 0 or not _EAST_ASIAN.match(word.text):
        return False
    left, top, right, bottom = word.box
    return len(word.text) == 1 or bottom - top > max(1.5 * word.size, right - left)
