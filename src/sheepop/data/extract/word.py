"""Turns Word documents (docx) into Markdown: headings, numbered lists, tables and notes in the order of the text.

Headers, footers, comments and tracked deletions are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from sheepop.data.extract.archive import office_package
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import heading, item, join, one_line, table
from sheepop.data.extract.office_parts import Blocks, Element, OfficeParts, document, formula, integer, local_name
from sheepop.data.extract.word_styles import Numbering, Styles, W, value

_RELATIONSHIP = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_WRAPPERS = frozenset({"sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag"})
_LEFT_OUT = frozenset(
    {"pPr", "rPr", "sdtPr", "sdtEndPr", "customXmlPr", "smartTagPr", "del", "moveFrom", "delText", "instrText"}
    | {"delInstrText", "rubyPr", "fldChar", "ffData"}
)
_BREAKS_OF_PAGES = frozenset({"page", "column"})
_MARKS = {"tab": "\t", "ptab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}
# The most columns that Word allows in a table.
_MOST_COLUMNS = 63
_SEPARATORS = frozenset({"separator", "continuationSeparator", "continuationNotice"})


def extract_docx(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """Yields one document of prose, and the embedded documents in other formats.

    Metadata: ``title``, ``author``, ``language`` and ``date`` if the file states them. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        walk = _Walk(parts)
        text = join(walk.everything())
        if text or not walk.embedded:
            yield document(text, parts.properties())
        for number, name in enumerate(walk.embedded, 1):
            yield from context.inner(Content(name, data=parts.bytes(name)), f"embedded document {number}")


class _Walk:
    """Walks through the body; text boxes come after their paragraph, and notes at the end of the document."""

    def __init__(self, parts: OfficeParts) -> None:
        self._parts = parts
        self._styles = Styles(parts.first(parts.main, "styles"))
        self._numbering = Numbering(parts.first(parts.main, "numbering"))
        self._boxes: list[Element] = []
        # The notes by kind and identifier in the order of their numbers.
        self._notes: list[tuple[str, str]] = []
        self._note_numbers: dict[tuple[str, str], int] = {}
        self.embedded: list[str] = []

    def everything(self) -> Blocks:
        """Returns the blocks of the main part, and the notes to which it refers."""
        body = self._parts.xml(self._parts.main).find(f"{W}body")
        if body is None:
            raise ExtractionError("damaged", "the main part has no body")
        blocks = self._blocks(body)
        roots = {kind: self._parts.first(self._parts.main, f"{kind}s") for kind in ("footnote", "endnote")}
        notes = {
            (kind, note.get(f"{W}id") or ""): note
            for kind, root in roots.items()
            for note in (() if root is None else root.findall(f"{W}{kind}"))
            if note.get(f"{W}type") not in _SEPARATORS
        }
        # A note may refer to further notes, which are appended to this list during the loop.
        for number, key in enumerate(self._notes, 1):
            if key in notes:
                blocks.append(("item", f"[^{number}]: {join(self._blocks(notes[key]))}"))
        return blocks

    def _blocks(self, container: Element) -> Blocks:
        return [block for child in container for block in self._block(child)]

    def _block(self, element: Element) -> Blocks:
        name = local_name(element)
        if name == "p":
            text = self._inline(element)
            boxes, self._boxes = self._boxes, []
            return [self._written(element, text), *(block for box in boxes for block in self._blocks(box))]
        if name == "tbl":
            return self._table(element)
        if name == "altChunk":
            part = self._parts.target(self._parts.main, element.get(_RELATIONSHIP) or "")
            self.embedded += [part] if part else []
        if name == "AlternateContent":
            return self._blocks(_chosen(element))
        return self._blocks(element) if name in _WRAPPERS else []

    def _written(self, paragraph: Element, text: str) -> tuple[str, str]:
        style = self._styles.of(paragraph)
        if style.is_code:
            return "line", text
        # An item without text uses up a number too.
        list_number, level = self._styles.numbering(paragraph)
        if level is None:
            level = self._numbering.level_of_style(list_number, style.identifier)
        label, text = self._numbering.label(list_number, level) or "", text.strip()
        if style.heading and text:
            return "heading", heading(style.heading, text if label == "-" else f"{label} {text}")
        return ("item", item(level, label, text)) if label and text else ("text", text)

    def _table(self, element: Element) -> Blocks:
        rows = [row for row in _children(element, "tr") if row.find(f"{W}trPr/{W}del") is None]
        cells = [list(_children(row, "tc")) for row in rows]
        if max(map(len, cells), default=0) < 2 or element.find(f".//{W}tbl") is not None:
            # A frame around text, not rows and columns.
            return [block for row in cells for cell in row for block in self._blocks(cell)]
        grid = [[text for cell in row for text in self._cell(cell)] for row in cells]
        before = [integer(value(row, "trPr/gridBefore"), 0, _MOST_COLUMNS) for row in rows]
        return [("table", table([""] * count + line for count, line in zip(before, grid, strict=True)))]

    def _cell(self, cell: Element) -> list[str]:
        """Returns the text of a cell, and empty texts for the further columns that it covers."""
        text = one_line(self._blocks(cell))
        continues = value(cell, "tcPr/vMerge") not in (None, "restart")
        return ["" if continues else text, *[""] * (integer(value(cell, "tcPr/gridSpan"), 1, _MOST_COLUMNS) - 1)]

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
            key = name.removesuffix("Reference"), element.get(f"{W}id") or ""
            if key not in self._note_numbers:
                self._notes.append(key)
            return f"[^{self._note_numbers.setdefault(key, len(self._notes))}]"
        if name == "oMath":
            return formula(element)
        if name == "AlternateContent":
            return self._inline(_chosen(element))
        if name in ("drawing", "pict", "object"):
            self._boxes += element.iterdescendants(f"{W}txbxContent")
            return ""
        text = self._inline(element)
        return f"({text})" if name == "rt" else text


def _chosen(alternatives: Element) -> Element:
    """Returns the first of the alternatives, which have the same content in a newer and an older form."""
    return alternatives[0] if len(alternatives) else alternatives


def _children(element: Element, wanted: str) -> Iterator[Element]:
    """Yields the rows of a table or the cells of a row, also those inside content controls."""
    for child in element:
        name = local_name(child)
        if name == wanted:
            yield child
        elif name in _WRAPPERS:
            yield from _children(child, wanted)
