"""Turns Word documents (docx) into Markdown: headings, numbered lists, tables and notes in the order of the text.

Headers, footers, comments, tracked deletions, hidden text and readings above characters (ruby) are left out. What a
picture shows stands in brackets, if the document says it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from sheepop.data.extract.archive import office_package
from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError
from sheepop.data.extract.markdown import heading, item, join, one_line, table
from sheepop.data.extract.office_parts import Blocks, Element, OfficeParts, document, formula, integer, local_name
from sheepop.data.extract.symbol_fonts import SYMBOL_FONTS, in_symbol_font

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing}docPr"
_RELATIONSHIP = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_WRAPPERS = frozenset({"sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag"})
_LEFT_OUT = frozenset(
    {"pPr", "rPr", "sdtPr", "sdtEndPr", "customXmlPr", "smartTagPr", "del", "moveFrom", "delText", "instrText"}
    | {"delInstrText", "rubyPr", "rt", "fldChar", "ffData"}
)
_BREAKS_OF_PAGES, _INITIALS = ("page", "column"), ("drop", "margin")
_MARKS = {"tab": "\t", "ptab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}
# The most columns that Word allows in a table.
_MOST_COLUMNS = 63
_SEPARATORS = frozenset({"separator", "continuationSeparator", "continuationNotice"})
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
# The names of code styles in Word, pandoc and LibreOffice.
CODE_STYLES = frozenset(
    {"code", "code block", "html preformatted", "macro", "preformatted text", "source code", "verbatim"}
)
_BODY_TEXT_LEVEL = 9
LONGEST_CHAIN = 20
_LEVELS = 9
_PLACE = re.compile(r"%([1-9])")
_CODE = re.compile(r"[0-9A-Fa-f]{1,4}")
_IS_SYMBOL = re.compile("[\uf020-\uf0ff]")
# A longer table inside another is the content of a frame.
_LONGEST_INNER_TABLE = 300
_LARGEST = 10_000
_ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX"}
_ROMAN |= {5: "V", 4: "IV", 1: "I"}


def extract_docx(content: Content, context: Context) -> Documents:
    """Yields one document of prose with the facts that `OfficeParts.properties` finds, and the embedded documents.

    ``hidden_characters`` counts the characters of hidden text, ``unknown_characters`` symbols without a meaning.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        walk = _Walk(parts)
        text = join(walk.everything())
        if text or not walk.embedded:
            counts = {"hidden_characters": walk.hidden, "unknown_characters": walk.unknown}
            yield document(text, parts.properties() | {name: str(count) for name, count in counts.items() if count})
        for number, name in enumerate(walk.embedded, 1):
            yield from context.inner(Content(name, data=parts.bytes(name)), f"embedded document {number}")


@cache
def _path(names: str) -> str:
    return "/".join(f"{W}{name}" for name in names.split("/"))


def value(element: Element, names: str) -> str | None:
    """Returns the value of the first element at a path such as ``pPr/pStyle`` ("" without one), or None if absent."""
    found = element.find(_path(names))
    return None if found is None else found.get(f"{W}val") or ""


class ParagraphStyle(NamedTuple):
    """A style: its identifier, its heading level (0 for none), and whether it is for code."""

    identifier: str
    heading: int
    is_code: bool


class Styles:
    """The styles of a document, from the root of its part ``styles``."""

    def __init__(self, root: Element | None) -> None:
        elements = [] if root is None else root.findall(f"{W}style")
        self._elements: dict[str, Element] = {element.get(f"{W}styleId"): element for element in elements}
        self._default = next((element.get(f"{W}styleId") for element in elements if _is_default(element)), "")
        self._known: dict[tuple[str, int], ParagraphStyle] = {}

    def of(self, paragraph: Element) -> ParagraphStyle:
        """Returns the style of a paragraph, with the outline level that the paragraph itself may set."""
        key = self._identifier(paragraph), _outline_level(paragraph)
        if key not in self._known:
            self._known[key] = self._described(*key)
        return self._known[key]

    def numbering(self, paragraph: Element) -> tuple[str, int | None]:
        """Returns the list number of a paragraph ("" for none), and its level in the list, or None if not stated."""
        level: int | None = None
        for element in (paragraph, *self._chain(self._identifier(paragraph))):
            properties = element.find(_path("pPr/numPr"))
            if properties is not None:
                level = integer(value(properties, "ilvl"), None) if level is None else level
                number = value(properties, "numId")
                if number is not None:
                    return number, level if element is not paragraph or level is not None else 0
        return "", level

    def hides(self, run: Element, paragraph: Element | None) -> bool:
        """Returns whether a run is hidden text, by itself or by its own or the paragraph's style."""
        styles = self._chain(value(run, "rPr/rStyle") or "")
        styles += [] if paragraph is None else self._chain(self._identifier(paragraph))
        stated = (value(element, "rPr/vanish") for element in (run, *styles))
        return next((state not in ("0", "false", "off") for state in stated if state is not None), False)

    def _identifier(self, paragraph: Element) -> str:
        style = value(paragraph, "pPr/pStyle")
        return (self._default if style is None else style) or ""

    def _described(self, identifier: str, level: int) -> ParagraphStyle:
        chain = self._chain(identifier)
        names = [(value(element, "name") or "").lower() for element in chain]
        level = next((found for found in (level, *map(_outline_level, chain)) if found >= 0), _BODY_TEXT_LEVEL)
        heading = 0 if level >= _BODY_TEXT_LEVEL else level + 1
        for name in names:
            match = _HEADING.fullmatch(name)
            heading = heading or (int(match[1]) if match else int(name == "title"))
        return ParagraphStyle(identifier, heading, not CODE_STYLES.isdisjoint(names))

    def _chain(self, identifier: str) -> list[Element]:
        """Returns the style followed by its parent styles."""
        chain: list[Element] = []
        while identifier in self._elements and len(chain) < LONGEST_CHAIN:
            chain.append(self._elements[identifier])
            identifier = value(chain[-1], "basedOn") or ""
        return chain


def _is_default(element: Element) -> bool:
    return element.get(f"{W}type") == "paragraph" and element.get(f"{W}default") in ("1", "true", "on")


def _outline_level(element: Element) -> int:
    return integer(value(element, "pPr/outlineLvl"), -1)


class _Level(NamedTuple):
    start: int = 1
    style: str = "decimal"
    text: str = ""
    paragraph_style: str = ""


class Numbering:
    """Gives paragraphs their labels, in the order of the document (ECMA-376, part 1, 17.9)."""

    def __init__(self, root: Element | None) -> None:
        # Several lists may share their levels and the last number on each.
        shared: dict[str, tuple[list[_Level], dict[int, int]]] = {}
        self._lists: dict[str, tuple[list[_Level], dict[int, int]]] = {}
        self._restarts: dict[str, dict[int, int]] = {}
        for element in () if root is None else root.findall(f"{W}abstractNum"):
            shared[element.get(f"{W}abstractNumId") or ""] = _levels(element), {}
        for element in () if root is None else root.findall(f"{W}num"):
            number = element.get(f"{W}numId") or ""
            self._lists[number] = shared.get(value(element, "abstractNumId") or "", ([], {}))
            self._restarts[number] = {
                integer(override.get(f"{W}ilvl"), 0): integer(start, 1)
                for override in element.findall(f"{W}lvlOverride")
                if (start := value(override, "startOverride")) is not None
            }

    def level_of_style(self, number: str, style: str) -> int:
        """Returns the level of list `number` that belongs to this paragraph style, or 0."""
        levels, _ = self._lists.get(number, ([], {}))
        return next((at for at, level in enumerate(levels) if level.paragraph_style == style), 0)

    def label(self, number: str, level: int) -> str | None:
        """Returns the label of the next item of list `number` on `level`, such as ``-``, ``3.`` or ``b)``, or None."""
        levels, counts = self._lists.get(number, ([], {}))
        if not 0 <= level < len(levels):
            return None
        restart = self._restarts[number].pop(level, None)
        count(counts, level, levels[level].start if restart is None else restart, restarts=restart is not None)
        if levels[level].style == "bullet":
            return "-"

        def numbered(place: re.Match[str]) -> str:
            at = int(place[1]) - 1
            return numeral(counts.get(at, levels[at].start), levels[at].style)

        return _PLACE.sub(numbered, levels[level].text).strip()


def _levels(element: Element) -> list[_Level]:
    levels = [_Level()] * _LEVELS
    for child in element.findall(f"{W}lvl"):
        at = integer(child.get(f"{W}ilvl"), -1)
        if 0 <= at < _LEVELS:
            style, text, of_style = (value(child, name) or "" for name in ("numFmt", "lvlText", "pStyle"))
            levels[at] = _Level(integer(value(child, "start"), 1), style or "decimal", text, of_style)
    return levels


def count(counts: dict[int, int], level: int, first: int, *, restarts: bool = False) -> int:
    """Returns the next number on a level of a list and updates its last numbers `counts`; deeper levels restart."""
    for deeper in [at for at in counts if at > level]:
        del counts[deeper]
    counts[level] = first if restarts or level not in counts else counts[level] + 1
    return counts[level]


def numeral(number: int, style: str) -> str:
    """Returns a number in a numbering format of Word (ECMA-376, part 1, 17.18.59); rare formats become decimal."""
    if not 0 < number <= _LARGEST:
        return str(number)
    texts = {"decimalZero": f"{number:02d}", "upperLetter": _letters(number), "upperRoman": _roman(number), "none": ""}
    text = texts.get(style.replace("lower", "upper"), str(number))
    return text.lower() if style.startswith("lower") else text


def _letters(number: int) -> str:
    """Returns A to Z, then AA, BB and so on, like Word."""
    return chr(ord("A") + (number - 1) % 26) * ((number - 1) // 26 + 1)


def _roman(number: int) -> str:
    text = ""
    for size, sign in _ROMAN.items():
        text += sign * (number // size)
        number %= size
    return text


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
        self.hidden = self.unknown = 0
        self._paragraph: Element | None = None
        self._initial = ""  # the large letter that the next paragraph begins with

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
        blocks = [block for child in container for block in self._block(child)]
        rest, self._initial = self._initial, ""
        return [*blocks, ("text", rest)] if rest else blocks

    def _block(self, element: Element) -> Blocks:
        name = local_name(element)
        if name == "p":
            around, self._paragraph = self._paragraph, element
            text, self._initial = self._initial + self._inline(element), ""
            self._paragraph = around
            boxes, self._boxes = self._boxes, []
            frame = element.find(_path("pPr/framePr"))
            if frame is not None and frame.get(f"{W}dropCap") in _INITIALS:
                self._initial, text = text.strip(), ""
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
        inner = ["".join(nested.itertext()) for nested in element.iterfind(f".//{W}tbl")]
        is_frame = any(len(text) > _LONGEST_INNER_TABLE for text in inner) or (len(rows) == 1 and inner)
        if is_frame or max(map(len, cells), default=0) < 2:
            # A frame around text, not rows and columns.
            return [block for row in cells for cell in row for block in self._blocks(cell)]
        grid = [[text for cell in row for text in self._cell(cell)] for row in cells]
        before = [integer(value(row, "trPr/gridBefore"), 0, _MOST_COLUMNS) for row in rows]
        return [("table", table([""] * count + line for count, line in zip(before, grid, strict=True)))]

    def _cell(self, cell: Element) -> list[str]:
        """Returns the text of a cell, and empty texts for the further columns that it covers."""
        # The rows of a table in a cell are separated by semicolons, like a list in a sentence.
        blocks = [(kind, _in_line(text) if kind == "table" else text) for kind, text in self._blocks(cell)]
        text = one_line(blocks)
        continues = value(cell, "tcPr/vMerge") not in (None, "restart")
        return ["" if continues else text, *[""] * (integer(value(cell, "tcPr/gridSpan"), 1, _MOST_COLUMNS) - 1)]

    def _inline(self, element: Element) -> str:
        return "".join(map(self._piece, element))

    def _piece(self, element: Element) -> str:
        name = local_name(element)
        if name in _LEFT_OUT:
            return ""
        if name == "t":
            return self._text(element.text or "", _font(element.getparent()))
        if name == "sym":
            code = element.get(f"{W}char") or ""
            return self._text(chr(int(code, 16)) if _CODE.fullmatch(code) else "", element.get(f"{W}font") or "")
        if name == "r" and self._styles.hides(element, self._paragraph):
            self.hidden += len("".join(element.itertext(f"{W}t")))
            return ""
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
            described = (picture.get("descr") or "" for picture in element.iterdescendants(_PICTURE))
            return " ".join(f"[{' '.join(text.split())}]" for text in described if text.strip())
        return self._inline(element)

    def _text(self, text: str, font: str) -> str:
        """Returns a text with the characters that a symbol font shows for its codes."""
        if not _IS_SYMBOL.search(text) and font.lower() not in SYMBOL_FONTS:
            return text
        text, unknown = in_symbol_font(text, font)
        self.unknown += unknown
        return text


def _font(run: Element) -> str:
    fonts = run.find(_path("rPr/rFonts"))
    return "" if fonts is None else fonts.get(f"{W}ascii") or fonts.get(f"{W}hAnsi") or ""


def _in_line(written: str) -> str:
    """Returns a Markdown table as one line."""
    rows = [line.strip("| ").split(" | ") for line in written.splitlines()]
    rows = [row for row in rows if set("".join(row)) - set("- |")]
    return "; ".join(" ".join(filter(None, (cell.strip() for cell in row))) for row in rows)


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
