"""Word documents (docx) as Markdown: headings, numbered lists, tables and notes in the order of the text.

Left out are headers and footers, comments and what was deleted with changes being tracked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import fenced, join, table
from sheepop.data.extract.office_math import formula
from sheepop.data.extract.office_parts import Element, OfficeParts, local_name
from sheepop.data.extract.word_numbering import Numbering, W
from sheepop.data.extract.word_styles import Styles
from sheepop.data.extract.zip_safety import office_package

_RELATIONSHIP = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_WRAPPERS = frozenset({"sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag"})
_LEFT_OUT = frozenset(
    {"pPr", "rPr", "sdtPr", "sdtEndPr", "customXmlPr", "smartTagPr", "del", "moveFrom", "delText", "instrText"}
    | {"delInstrText", "rubyPr", "fldChar", "ffData"}
)
_BREAKS_OF_PAGES = frozenset({"page", "column"})
_MARKS = {"tab": "\t", "ptab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}
# What Word allows in a table.
_MOST_COLUMNS = 63
_SEPARATORS = frozenset({"separator", "continuationSeparator", "continuationNotice"})


def extract_docx(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose, and what is embedded as documents in other formats.

    Metadata: ``title``, ``author``, ``language`` and ``date`` where the file states them. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        document = _Document(parts)
        document.read()
        text = document.text()
        if text:
            yield Extracted(text, metadata=parts.properties())
        for number, name in enumerate(document.embedded, 1):
            yield from context.inner(Content(name, data=parts.bytes(name)), f"embedded document {number}")
        if not text and not document.embedded:
            raise ExtractionError("empty", "the document has no text")


class _Document:
    """The walk through the body; text boxes and notes wait for the end of their paragraph or of the document."""

    def __init__(self, parts: OfficeParts) -> None:
        self._parts = parts
        self._styles = Styles(parts.first(parts.main, "styles"))
        self._numbering = Numbering(parts.first(parts.main, "numbering"))
        self._blocks: list[tuple[str, str]] = []
        self._code: list[str] = []
        self._boxes: list[Element] = []
        self._notes: list[tuple[str, str]] = []
        self._note_numbers: dict[tuple[str, str], int] = {}
        self.embedded: list[str] = []

    def read(self) -> None:
        """Reads the main part and the notes to which it refers."""
        body = self._parts.xml(self._parts.main).find(f"{W}body")
        if body is None:
            raise ExtractionError("damaged", "the main part has no body")
        self._container(body)
        self._end_code()
        notes = {kind: self._notes_of(kind) for kind in ("footnote", "endnote")}
        # A note may itself refer to further notes, which then come behind.
        for number, (kind, identifier) in enumerate(self._notes, 1):
            note = notes[kind].get(identifier)
            if note is not None:
                start = len(self._blocks)
                self._container(note)
                self._end_code()
                text = join(self._blocks[start:])
                del self._blocks[start:]
                self._blocks.append(("item", f"[^{number}]: {text}"))

    def text(self) -> str:
        """The document as Markdown."""
        return join(self._blocks)

    def _notes_of(self, kind: str) -> dict[str, Element]:
        root = self._parts.first(self._parts.main, f"{kind}s")
        notes = [] if root is None else root.findall(f"{W}{kind}")
        return {note.get(f"{W}id"): note for note in notes if note.get(f"{W}type") not in _SEPARATORS}

    def _container(self, container: Element) -> None:
        for child in container:
            name = local_name(child)
            if name == "p":
                self._paragraph(child)
            elif name == "tbl":
                self._end_code()
                self._table(child)
            elif name in _WRAPPERS:
                self._container(child)
            elif name == "AlternateContent":
                self._container(_chosen(child))
            elif name == "altChunk":
                part = self._parts.target(self._parts.main, child.get(_RELATIONSHIP) or "")
                self.embedded += [part] if part else []

    def _paragraph(self, paragraph: Element) -> None:
        text = self._inline(paragraph)
        style = self._styles.of(paragraph)
        if style.is_code:
            self._code.append(text)
        else:
            self._end_code()
            # An item without text takes its number too.
            label, text = self._label(paragraph), text.strip()
            if not text:
                pass
            elif style.heading:
                number = f"{label[1]} " if label and label[1] != "-" else ""
                self._blocks.append(("heading", f"{'#' * style.heading} {number}{' '.join(text.split())}"))
            elif label is None:
                self._blocks.append(("text", text))
            else:
                self._blocks.append(("item", _item(*label, text)))
        boxes, self._boxes = self._boxes, []
        for box in boxes:
            self._container(box)

    def _end_code(self) -> None:
        code = "\n".join(self._code).strip("\n")
        self._code = []
        if code.strip():
            self._blocks.append(("code", fenced(code)))

    def _label(self, paragraph: Element) -> tuple[int, str] | None:
        """Level and label of a paragraph that is an item of a list."""
        number, level = self._styles.numbering(paragraph)
        if level is None:
            level = self._numbering.level_of_style(number, self._styles.of(paragraph).identifier)
        label = self._numbering.label(number, level)
        return (level, label) if label else None

    def _table(self, element: Element) -> None:
        rows = [row for row in _children(element, "tr") if not _is_deleted_row(row)]
        cells = [_children(row, "tc") for row in rows]
        if max(map(len, cells), default=0) < 2 or element.find(f".//{W}tbl") is not None:
            # A frame around text, rather than rows and columns.
            for cell in (cell for row in cells for cell in row):
                self._container(cell)
            return
        grid = [[text for cell in row for text in self._cell(cell)] for row in cells]
        grid = [[""] * _columns_before(row) + line for row, line in zip(rows, grid, strict=True)]
        text = table(grid)
        if text:
            self._blocks.append(("table", text))

    def _cell(self, cell: Element) -> list[str]:
        """The text of a cell, and empty ones for the columns that it covers beside its first."""
        start = len(self._blocks)
        self._container(cell)
        self._end_code()
        text = " ".join(block for _, block in self._blocks[start:])
        del self._blocks[start:]
        return ["" if _continues(cell) else text, *[""] * (_span(cell) - 1)]

    def _inline(self, element: Element) -> str:
        return "".join(map(self._piece, element))

    def _piece(self, element: Element) -> str:
        name = local_name(element)
        if name in _LEFT_OUT:
            return ""
        if name == "t":
            return element.text or ""
        if name in _MARKS:
            return _MARKS[name]
        if name == "br":
            return "" if element.get(f"{W}type") in _BREAKS_OF_PAGES else "\n"
        if name in ("footnoteReference", "endnoteReference"):
            return self._note(name.removesuffix("Reference"), element.get(f"{W}id") or "")
        if name == "oMath":
            return formula(element)
        if name == "AlternateContent":
            return self._inline(_chosen(element))
        if name in ("drawing", "pict", "object"):
            self._boxes += element.iterdescendants(f"{W}txbxContent")
            return ""
        if name == "rt":
            return f"({self._inline(element)})"
        return self._inline(element)

    def _note(self, kind: str, identifier: str) -> str:
        number = self._note_numbers.setdefault((kind, identifier), len(self._notes) + 1)
        if number > len(self._notes):
            self._notes.append((kind, identifier))
        return f"[^{number}]"


def _chosen(alternatives: Element) -> Element:
    """The first of the alternatives, which say the same in a newer and an older way."""
    return alternatives[0] if len(alternatives) else alternatives


def _children(element: Element, wanted: str) -> list[Element]:
    """The rows of a table or the cells of a row, also inside content controls."""
    found: list[Element] = []
    for child in element:
        name = local_name(child)
        if name == wanted:
            found.append(child)
        elif name in _WRAPPERS:
            found += _children(child, wanted)
    return found


def _is_deleted_row(row: Element) -> bool:
    return row.find(f"{W}trPr/{W}del") is not None


def _columns_before(row: Element) -> int:
    return _columns(row.find(f"{W}trPr/{W}gridBefore"), 0)


def _span(cell: Element) -> int:
    return _columns(cell.find(f"{W}tcPr/{W}gridSpan"), 1)


def _continues(cell: Element) -> bool:
    merge = cell.find(f"{W}tcPr/{W}vMerge")
    return merge is not None and merge.get(f"{W}val") != "restart"


def _columns(element: Element | None, default: int) -> int:
    text = "" if element is None else element.get(f"{W}val") or ""
    return min(int(text), _MOST_COLUMNS) if re.fullmatch(r"\d{1,9}", text) else default


def _item(level: int, label: str, text: str) -> str:
    lines = text.split("\n")
    indent = "  " * level
    return "\n".join([f"{indent}{label} {lines[0]}", *(f"{indent}{' ' * len(label)} {line}" for line in lines[1:])])
