"""OpenDocument texts and presentations (odt, odp) as Markdown, in the order of the text.

Left out are headers and footers, comments, formulas, and what was deleted with changes being tracked.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import fenced, join, marked, table
from sheepop.data.extract.office_parts import PROPERTIES, Element, local_name, parse_xml
from sheepop.data.extract.word_numbering import NUMBERS
from sheepop.data.extract.word_styles import CODE_STYLES
from sheepop.data.extract.zip_safety import safe_zip

_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
_SHOW = "{urn:oasis:names:tc:opendocument:xmlns:presentation:1.0}"
_DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
_LEFT_OUT = frozenset(
    {"tracked-changes", "annotation", "sequence-decls", "forms", "settings", "note-citation", "ruby-text", "desc"}
    | {"variable-decls", "user-field-decls", "title", "object", "header-decl", "footer-decl", "date-time-decl"}
)
_ON_EVERY_SLIDE = frozenset({"header", "footer", "date-time", "page-number"})
_FORMATS = {"1": "", "a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_MANIFEST = "META-INF/manifest.xml"
_DEEPEST_HEADING = 6
_MOST_REPEATED = 1000
_LONGEST_CHAIN = 20

Blocks = list[tuple[str, str]]


def extract_odt(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose.

    Metadata: ``title``, ``author``, ``language`` and ``date`` where the file states them. Raises `ExtractionError`.
    """
    with safe_zip(content, context) as archive:
        walk = _Walk(archive)
        blocks = walk.blocks(walk.body)
        text = _written([*blocks, *walk.notes])
        if not text:
            raise ExtractionError("empty", "the document has no text")
        yield Extracted(text, metadata=_facts(archive))


def extract_odp(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose with a mark ``slide N`` for each slide, and its speaker notes; raises `ExtractionError`."""
    with safe_zip(content, context) as archive:
        walk = _Walk(archive)
        pages = enumerate(walk.body.iter(f"{_DRAW}page"), 1)
        text, marks = marked((f"slide {number}", _written(walk.slide(page))) for number, page in pages)
        if not text:
            raise ExtractionError("empty", "the slides have no text")
        yield Extracted(text, marks=marks, metadata=_facts(archive))


def refuse_encryption(archive: zipfile.ZipFile) -> None:
    """Raises `ExtractionError` where the list of the parts says that they are encrypted."""
    if _MANIFEST in archive.namelist() and b"encryption-data" in archive.read(_MANIFEST):
        raise ExtractionError("encrypted", "it needs a password")


class _Walk:
    """The walk through the body of a document; notes wait for its end."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        names = set(archive.namelist())
        refuse_encryption(archive)
        if "content.xml" not in names:
            raise ExtractionError("damaged", "it has no content.xml")
        content = parse_xml("content.xml", archive.read("content.xml"))
        roots = [content, *(parse_xml(name, archive.read(name)) for name in ("styles.xml",) if name in names)]
        body = content.find("{*}body")
        if body is None:
            raise ExtractionError("damaged", "content.xml has no body")
        self.body: Element = body
        self.notes: Blocks = []
        self._styles = {e.get(f"{_STYLE}name"): e for root in reversed(roots) for e in root.iter(f"{_STYLE}style")}
        self._lists = {e.get(f"{_STYLE}name"): e for root in reversed(roots) for e in root.iter(f"{_TEXT}list-style")}
        self._counts: dict[tuple[str, int], int] = {}

    def slide(self, page: Element) -> Blocks:
        """Title, text and notes of a slide."""
        blocks: Blocks = []
        notes: list[str] = []
        for shape in page:
            kind = shape.get(f"{_SHOW}class")
            if local_name(shape) == "notes":
                frames = [frame for frame in shape if frame.get(f"{_SHOW}class") == "notes"]
                notes += [text for frame in frames for _, text in self.blocks(frame)]
            elif kind == "title":
                text = " ".join(text for _, text in self.blocks(shape))
                blocks[:0] = [("heading", f"# {text}")] if text else []
            elif kind not in _ON_EVERY_SLIDE:
                blocks += self.blocks(shape)
        return [*blocks, ("text", "\n".join(["Notes:", *notes]))] if notes else blocks

    def blocks(self, container: Element) -> Blocks:
        """What stands in a container; a line of code is a block of its own."""
        return [block for child in container for block in self._block(child)]

    def _block(self, element: Element) -> Blocks:
        name = local_name(element)
        if name in _LEFT_OUT:
            return []
        if name in ("p", "h"):
            return self._paragraph(element, name)
        if name == "list":
            return self._list(element, element.get(f"{_TEXT}style-name") or "", 1)
        if name == "table":
            text = table(self._rows(element))
            return [("table", text)] if text else []
        return self.blocks(element)

    def _paragraph(self, element: Element, name: str) -> Blocks:
        text = self._inline(element)
        boxes = [block for box in element.iter(f"{_DRAW}text-box") for block in self.blocks(box)]
        styles = self._style_names(element)
        if not text.strip():
            return boxes
        if any(style in CODE_STYLES for style in styles):
            return [("code", text), *boxes]
        text = text.strip()
        if name == "h" or "title" in styles:
            level = element.get(f"{_TEXT}outline-level") or "1"
            depth = min(int(level), _DEEPEST_HEADING) if re.fullmatch(r"[1-9]\d?", level) else 1
            return [("heading", f"{'#' * depth} {' '.join(text.split())}"), *boxes]
        return [("text", text), *boxes]

    def _style_names(self, element: Element) -> list[str]:
        """The names of the style of a paragraph and of those on which it is based, in lower case."""
        names: list[str] = []
        name = element.get(f"{_TEXT}style-name")
        while name and len(names) < _LONGEST_CHAIN:
            names.append(re.sub("_([0-9a-f]{2})_", lambda code: chr(int(code[1], 16)), name).lower())
            style = self._styles.get(name)
            name = None if style is None else style.get(f"{_STYLE}parent-style-name")
        return names

    def _list(self, element: Element, style: str, level: int) -> Blocks:
        if element.get(f"{_TEXT}continue-list") is None and element.get(f"{_TEXT}continue-numbering") != "true":
            self._counts.pop((style, level), None)
        blocks: Blocks = []
        for item in element:
            is_first = local_name(item) == "list-item"
            for child in item:
                if local_name(child) == "list":
                    blocks += self._list(child, child.get(f"{_TEXT}style-name") or style, level + 1)
                    continue
                for _, text in self._block(child):
                    label = self._label(item, style, level) if is_first else ""
                    is_first = False
                    first, *rest = text.split("\n")
                    indent = "  " * (level - 1)
                    more = [f"{indent}{' ' * len(label)} {line}" for line in rest]
                    blocks.append(
                        ("item", "\n".join([f"{indent}{label} {first}" if label else f"{indent}  {first}", *more]))
                    )
        return blocks

    def _label(self, item: Element, style: str, level: int) -> str:
        levels = self._lists.get(style, ())
        found = next((e for e in levels if e.get(f"{_TEXT}level") == str(level)), None)
        if found is None or local_name(found) != "list-level-style-number":
            return "-"
        for deeper in [key for key in self._counts if key[0] == style and key[1] > level]:
            del self._counts[deeper]
        start = item.get(f"{_TEXT}start-value") or found.get(f"{_TEXT}start-value") or "1"
        first = int(start) if re.fullmatch(r"\d{1,5}", start) else 1
        is_new = (style, level) not in self._counts or item.get(f"{_TEXT}start-value") is not None
        number = self._counts[style, level] = first if is_new else self._counts[style, level] + 1
        written = NUMBERS.get(_FORMATS.get(found.get(f"{_STYLE}num-format") or "", ""), str)(number)
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
                        text = " ".join(text for _, text in self.blocks(cell))
                        times = cell.get(f"{_TABLE}number-columns-repeated") or "1"
                        count = min(int(times), _MOST_REPEATED) if re.fullmatch(r"\d{1,5}", times) else 1
                        cells += [text] * count
                yield cells

    def _inline(self, element: Element) -> str:
        return (element.text or "") + "".join(self._piece(child) + (child.tail or "") for child in element)

    def _piece(self, element: Element) -> str:
        name = local_name(element)
        if name == "s":
            count = element.get(f"{_TEXT}c") or "1"
            return " " * (min(int(count), _MOST_REPEATED) if re.fullmatch(r"\d{1,5}", count) else 1)
        if name in ("tab", "line-break"):
            return "\t" if name == "tab" else "\n"
        if name == "note":
            number = len(self.notes) + 1
            self.notes.append(("item", ""))
            text = _written([block for body in element.iter(f"{_TEXT}note-body") for block in self.blocks(body)])
            self.notes[number - 1] = ("item", f"[^{number}]: {text}")
            return f"[^{number}]"
        # Text boxes come behind the paragraph to which they are tied.
        return "" if name in _LEFT_OUT or name == "frame" else self._inline(element)


def _written(blocks: Blocks) -> str:
    """The blocks as one text, lines of code that follow each other between fences."""
    groups = ((kind, [text for _, text in group]) for kind, group in groupby(blocks, key=itemgetter(0)))
    return join(
        block
        for kind, texts in groups
        for block in ([(kind, fenced("\n".join(texts)))] if kind == "code" else [(kind, text) for text in texts])
    )


def _facts(archive: zipfile.ZipFile) -> dict[str, str]:
    if "meta.xml" not in archive.namelist():
        return {}
    facts: dict[str, str] = {}
    for element in parse_xml("meta.xml", archive.read("meta.xml")).iter():
        fact = PROPERTIES.get(
            local_name(element).replace("initial-creator", "creator").replace("creation-date", "created")
        )
        value = " ".join((element.text or "").split())
        if fact and value:
            facts.setdefault(fact, value[:10] if fact == "date" else value)
    return facts
