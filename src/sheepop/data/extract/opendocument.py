"""Turns OpenDocument texts and presentations (odt, odp) into Markdown, in the order of the text.

Headers, footers, comments, formulas, tracked deletions, hidden text and readings (ruby) are left out.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator

from sheepop.data.extract.archive import safe_zip
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError
from sheepop.data.extract.markdown import heading, item, join, one_line, table
from sheepop.data.extract.office_parts import (
    Blocks,
    Element,
    document,
    integer,
    local_name,
    parse_xml,
    presentation,
    properties,
    with_notes,
)
from sheepop.data.extract.word import CODE_STYLES, LONGEST_CHAIN, count, numeral

_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
_LIST = f"{_TEXT}list-style"
_SHOW = "{urn:oasis:names:tc:opendocument:xmlns:presentation:1.0}"
_DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
_LEFT_OUT = frozenset(
    {"tracked-changes", "annotation", "sequence-decls", "forms", "settings", "note-citation", "ruby-text", "desc"}
    | {"variable-decls", "user-field-decls", "title", "object", "header-decl", "footer-decl", "date-time-decl"}
)
_HIDDEN = frozenset({"hidden-text", "hidden-paragraph"})
_STYLED = frozenset({"p", "h", "span"})
_ON_EVERY_SLIDE = frozenset({"header", "footer", "date-time", "page-number"})
_FORMATS = {"1": "", "a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_MANIFEST = "META-INF/manifest.xml"
_MOST_REPEATED = 1000


def extract_odt(content: Content, context: Context) -> Documents:
    """Yields one document of prose with the facts that `properties` finds; raises `ExtractionError`."""
    with safe_zip(content, context) as archive:
        yield _text_document(_Walk(_roots(archive)))


def extract_flat_odt(content: Content, context: Context) -> Documents:
    """Yields the same for a document that is one XML file; raises `ExtractionError`."""
    yield _text_document(_Walk({"content.xml": parse_xml(content.name, content.read())}))


def _text_document(walk: _Walk) -> Extracted:
    blocks = walk.blocks(walk.body)
    facts = {**walk.facts, "hidden_characters": str(walk.hidden)} if walk.hidden else walk.facts
    return document(join([*blocks, *walk.notes]), facts)


def extract_odp(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark ``slide N`` and the notes of each slide; raises `ExtractionError`."""
    with safe_zip(content, context) as archive:
        walk = _Walk(_roots(archive))
        yield presentation(map(walk.slide, walk.body.iter(f"{_DRAW}page")), walk.facts)


def refuse_encryption(archive: zipfile.ZipFile) -> None:
    """Raises `ExtractionError` if the manifest says that the parts are encrypted."""
    if _MANIFEST in archive.namelist() and b"encryption-data" in archive.read(_MANIFEST):
        raise ExtractionError("encrypted", "it needs a password")


def _roots(archive: zipfile.ZipFile) -> dict[str, Element]:
    """Returns the root elements of the parts of a package by name."""
    refuse_encryption(archive)
    present = [name for name in ("content.xml", "styles.xml", "meta.xml") if name in archive.namelist()]
    if "content.xml" not in present:
        raise ExtractionError("damaged", "it has no content.xml")
    return {name: parse_xml(name, archive.read(name)) for name in present}


class _Walk:
    """Walks through the body of a document and collects its notes, which go to the end."""

    def __init__(self, roots: dict[str, Element]) -> None:
        content = roots["content.xml"]
        described = [roots.pop("meta.xml")] if "meta.xml" in roots else content.findall("{*}meta")
        self.facts, self.hidden = properties(*described), 0
        body = content.find("{*}body")
        if body is None:
            raise ExtractionError("damaged", "content.xml has no body")
        self.body: Element = body
        self.notes: Blocks = []
        # Styles of content.xml come last in this list and so override those of styles.xml.
        defining = [element for root in reversed(roots.values()) for element in root.iter(f"{_STYLE}style", _LIST)]
        self._styles = {element.get(f"{_STYLE}name"): element for element in defining if element.tag != _LIST}
        self._lists = {element.get(f"{_STYLE}name"): element for element in defining if element.tag == _LIST}
        self._counts: dict[str, dict[int, int]] = {}

    def slide(self, page: Element) -> Blocks:
        """Returns the title, text and notes of a slide."""
        blocks: Blocks = []
        notes: list[str] = []
        for shape in page:
            kind = shape.get(f"{_SHOW}class")
            if local_name(shape) == "notes":
                frames = [frame for frame in shape if frame.get(f"{_SHOW}class") == "notes"]
                notes += [text for frame in frames for _, text in self.blocks(frame) if text]
            elif kind == "title":
                blocks.insert(0, ("heading", heading(1, one_line(self.blocks(shape)))))
            elif kind not in _ON_EVERY_SLIDE:
                blocks += self.blocks(shape)
        return with_notes(blocks, notes)

    def blocks(self, container: Element) -> Blocks:
        """Returns the blocks in a container; each line of code is a block."""
        return [block for child in container for block in self._block(child)]

    def _block(self, element: Element) -> Blocks:
        name = local_name(element)
        if name in _LEFT_OUT or self._is_hidden(element):
            return []
        if name in ("p", "h"):
            return self._paragraph(element, name)
        if name == "list":
            return self._list(element, element.get(f"{_TEXT}style-name") or "", 1)
        if name == "table":
            return [("table", table(self._rows(element)))]
        return self.blocks(element)

    def _paragraph(self, element: Element, name: str) -> Blocks:
        text = self._inline(element)
        boxes = [block for box in element.iter(f"{_DRAW}text-box") for block in self.blocks(box)]
        names = self._style_names(element)
        styles = [re.sub("_([0-9a-f]{2})_", lambda code: chr(int(code[1], 16)), name).lower() for name in names]
        if not text.strip():
            return boxes
        if any(style in CODE_STYLES for style in styles):
            return [("line", text), *boxes]
        if name == "h" or "title" in styles:
            return [("heading", heading(integer(element.get(f"{_TEXT}outline-level"), 1) or 1, text)), *boxes]
        return [("text", text.strip()), *boxes]

    def _is_hidden(self, element: Element) -> bool:
        """Returns whether an element is hidden, by itself or by its style; counts its characters then."""
        hidden = element.get(f"{_TEXT}display") == "none" or local_name(element) in _HIDDEN
        for name in self._style_names(element) if local_name(element) in _STYLED else ():
            style = self._styles.get(name)
            display = None if style is None else style.find(f"{_STYLE}text-properties[@{_TEXT}display]")
            hidden = hidden or (display is not None and display.get(f"{_TEXT}display") == "none")
        self.hidden += len("".join(element.itertext())) if hidden else 0
        return hidden

    def _style_names(self, element: Element) -> list[str]:
        """Returns the names of the style of an element and of its parent styles."""
        names: list[str] = []
        name = element.get(f"{_TEXT}style-name")
        while name and len(names) < LONGEST_CHAIN:
            names.append(name)
            style = self._styles.get(name)
            name = None if style is None else style.get(f"{_STYLE}parent-style-name")
        return names

    def _list(self, element: Element, style: str, level: int) -> Blocks:
        if element.get(f"{_TEXT}continue-list") is None and element.get(f"{_TEXT}continue-numbering") != "true":
            self._counts.get(style, {}).pop(level, None)
        blocks: Blocks = []
        for entry in element:
            is_first = local_name(entry) == "list-item"
            for child in entry:
                if local_name(child) == "list":
                    blocks += self._list(child, child.get(f"{_TEXT}style-name") or style, level + 1)
                    continue
                for text in (text for _, text in self._block(child) if text):
                    label = self._label(entry, style, level) if is_first else " "
                    is_first = False
                    blocks.append(("item", item(level - 1, label, text)))
        return blocks

    def _label(self, element: Element, style: str, level: int) -> str:
        found = next((e for e in self._lists.get(style, ()) if e.get(f"{_TEXT}level") == str(level)), None)
        if found is None or local_name(found) != "list-level-style-number":
            return "-"
        own, first = (integer(stated.get(f"{_TEXT}start-value"), None) for stated in (element, found))
        first = own if own is not None else 1 if first is None else first
        number = count(self._counts.setdefault(style, {}), level, first, restarts=own is not None)
        written = numeral(number, _FORMATS.get(found.get(f"{_STYLE}num-format") or "", ""))
        return f"{found.get(f'{_STYLE}num-prefix') or ''}{written}{found.get(f'{_STYLE}num-suffix') or ''}" or "-"

    def _rows(self, element: Element) -> Iterator[list[str]]:
        for row in element:
            name = local_name(row)
            if name in ("table-header-rows", "table-rows", "table-row-group"):
                yield from self._rows(row)
            elif name == "table-row":
                cells: list[str] = []
                for cell in row:
                    if local_name(cell) in ("table-cell", "covered-table-cell"):
                        times = integer(cell.get(f"{_TABLE}number-columns-repeated"), 1, _MOST_REPEATED)
                        cells += [one_line(self.blocks(cell))] * times
                yield cells

    def _inline(self, element: Element) -> str:
        return (element.text or "") + "".join(self._piece(child) + (child.tail or "") for child in element)

    def _piece(self, element: Element) -> str:
        name = local_name(element)
        if name == "s":
            return " " * integer(element.get(f"{_TEXT}c"), 1, _MOST_REPEATED)
        if name in ("tab", "line-break"):
            return "\t" if name == "tab" else "\n"
        if name == "note":
            number = len(self.notes) + 1
            self.notes.append(("item", ""))
            text = join([block for body in element.iter(f"{_TEXT}note-body") for block in self.blocks(body)])
            self.notes[number - 1] = ("item", f"[^{number}]: {text}")
            return f"[^{number}]"
        if self._is_hidden(element):
            return ""
        # Text boxes come after the paragraph that contains them.
        return "" if name in _LEFT_OUT or name == "frame" else self._inline(element)
