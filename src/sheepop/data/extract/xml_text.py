"""Streams XML of any kind and extracts its text in the order of the file, with a line or paragraph per element.

No entity outside the file is ever loaded. Documents (DocBook, JATS, TEI, DITA, feeds) become prose, recognised by their
root element or by their sentences. All other XML is data and stays unchanged, as code in the language ``xml``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from html.entities import html5
from typing import Any

from lxml import etree

from sheepop.data.decoding import decode
from sheepop.data.extract.html import extract_html
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError
from sheepop.data.extract.languages import words
from sheepop.data.extract.markdown import fenced
from sheepop.data.extract.opendocument import extract_flat_odt
from sheepop.data.extract.page import SAFE, parse_page
from sheepop.data.extract.page_blocks import page_blocks, page_text

# Elements of DocBook, JATS, TEI, XHTML and feeds: paragraphs, blocks, roots of documents, verbatim text, escaped HTML.
_PARAGRAPHS = words(
    "abstract caption chapter-title descript description entry head h1 h2 h3 h4 h5 h6 item lem line li p para paragraph"
    " seg simpara speech subtitle summary td term th title verse article-title"
)
_BLOCKS = _PARAGRAPHS | words(
    "appendix article back blockquote body book chapter div example figure fig front glossary informaltable"
    " itemizedlist l lg list listitem list-item note ol orderedlist quote-block row sec section sect1 sect2 sect3 table"
    " tbody tgroup thead tr ul variablelist varlistentry warning"
)
_DOCUMENTS = words("article book chapter dita feed fictionbook opml refentry rss tei tei.2 teicorpus worddocument")
# Encoded files, codes of fields, and what programs note about a document, by the names of their parents ("": any).
_NO_TEXT = {
    "": words("binary bindata binary-data binarydata instrtext deltext documentproperties docpr docsuppdata"),
    "fictionbook": words("description stylesheet"),
    "head": words(
        "datecreated datemodified expansionstate ownerid docs vertscrollstate windowtop windowleft windowbottom"
        " windowright"
    ),
}
_VERBATIM = words("code-block literallayout pre preformat programlisting screen synopsis")
_ESCAPED_HTML = words("content description encoded summary")
_TAG = re.compile(r"(?i)<(?:p|br|a|div|img|ul|ol|li|b|i|em|strong|span|h[1-6]|table|pre|code|blockquote)\b[^>]*>")
_FLAT_ODT = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}document"
_XHTML = "{http://www.w3.org/1999/xhtml}html"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_SNIFFED_BYTES = 2**16
_OUTER_SUBSET = re.compile(rb"<!DOCTYPE\s+[^\s\[>]+\s+(?:SYSTEM|PUBLIC)|<!ENTITY\s+(?:%|\S+\s+(?:SYSTEM|PUBLIC))")
_SENTENCE_WORDS = 6
_LEAST_PROSE = 0.5


def extract_xml(content: Content, context: Context) -> Documents:
    """Yields XHTML as a web page, other XML as prose in documents of limited length, or as code if it is data.

    Raises `ExtractionError`: ``bomb`` for entities that multiply, ``oversized`` for elements too deep or too long for
    the parser, ``damaged`` if it is not well-formed, ``empty`` if it has no elements, ``unsupported`` for entities with
    elements that are defined too late.
    """
    root = next((str(element.tag) for _, element in _events(content)), None)
    if root is None:
        raise ExtractionError("empty", "the file has no elements")
    if root == _XHTML:
        yield from extract_html(content, context)
        return
    if root == _FLAT_ODT:
        yield from extract_flat_odt(content, context)
        return
    limit = context.config.max_document_bytes
    number = 0
    paragraphs: list[Paragraph] = []
    size = 0
    for paragraph in xml_paragraphs(content):
        if size + len(paragraph.text) > limit and paragraphs:
            number += 1
            yield Extracted(_text(paragraphs), place=f"part {number}")
            paragraphs, size = [], 0
        paragraphs.append(paragraph)
        size += len(paragraph.text.encode("utf-8")) + 2
    is_document = root.rpartition("}")[2].lower() in _DOCUMENTS
    if number == 0 and content.size <= limit and not (is_document and paragraphs) and not _is_prose(paragraphs):
        decoded = decode(content.read())
        yield Extracted(decoded.text, kind="code", language="xml", metadata={"encoding": decoded.encoding})
    elif paragraphs:
        yield Extracted(_text(paragraphs), place=f"part {number + 1}" if number else "")


@dataclass(slots=True)
class Paragraph:
    """A paragraph of text; its element decides `is_prose`, and with `gap` an empty line precedes it."""

    text: str
    is_prose: bool
    gap: bool


def xml_paragraphs(content: Content) -> Iterator[Paragraph]:
    """Yields the paragraphs of the file while reading it; raises `ExtractionError` like `extract_xml`."""
    flow = _Flow()
    events = _events(content)
    for event, element in events:
        if event == "start":
            if element.getparent() is not flow.open[-1].element:
                # An XML error in the rest would be a better explanation.
                deque(events, maxlen=0)
                raise ExtractionError("unsupported", "it defines entities with elements far from its beginning")
            flow.text(_between(element.getprevious(), element.getparent()))
            flow.start(element)
        else:
            flow.text(_between(element[-1] if len(element) else None, element))
            flow.end()
            # Frees the element and those before it, but not the text after it, which is not yet read.
            element.clear(keep_tail=True)
            while element.getprevious() is not None:
                del element.getparent()[0]
        yield from flow.done
        flow.done.clear()
    flow.flush()
    yield from flow.done


def _events(content: Content) -> Iterator[tuple[str, etree._Element]]:
    """Yields ("start" or "end", element) for the elements of a file in order."""
    head = content.head(_SNIFFED_BYTES).replace(b"\0", b"")
    # The parser expands entities defined in the file, within its limits. With entities defined outside it would stop at
    # their names; then none is expanded, and `_between` inserts those that HTML defines too.
    settings: Any = {**SAFE, "resolve_entities": False if _OUTER_SUBSET.search(head) else "internal", "load_dtd": False}
    events = ("start", "end")
    with content.open() as file:
        try:
            if b"<!ENTITY" in head:
                # Elements in entities are in their place only after the whole file is parsed.
                walk = etree.iterwalk(etree.parse(file, etree.XMLParser(**settings)), events=events)
                yield from ((event, node) for event, node in walk if isinstance(node.tag, str))
            else:
                yield from etree.iterparse(file, events=events, **settings)
        except etree.XMLSyntaxError as error:
            reason, detail = "damaged", str(error.msg)
            if error.code == etree.ErrorTypes.ERR_ENTITY_LOOP or "amplification" in detail:
                reason, detail = "bomb", "its entities expand without end"
            elif error.code == etree.ErrorTypes.ERR_RESOURCE_LIMIT:
                reason = "oversized"
            raise ExtractionError(reason, detail) from None


@dataclass(slots=True)
class _Open:
    """An open element; its text begins at piece `begin` of the current line, or is `skipped`."""

    element: etree._Element | None = None
    name: str = ""
    verbatim: bool = False
    has_text: bool = False
    skipped: bool = False
    is_prose: bool = False
    begin: int = 0
    has_children: bool = False


class _Flow:
    """Turns events into paragraphs: an element in text belongs to its line, one between elements is its own line."""

    def __init__(self) -> None:
        self.done: list[Paragraph] = []
        self.open = [_Open()]
        self._line: list[str] = []
        self._break_due = self._gap = self._in_prose = False

    def start(self, element: etree._Element) -> None:
        name = str(element.tag).rpartition("}")[2].lower()
        around = self.open[-1]
        around.has_children = True
        verbatim = around.verbatim or name in _VERBATIM or element.get(_SPACE) == "preserve"
        if not around.verbatim:
            if verbatim or name in _BLOCKS:
                self.flush()
                self._gap = True
            elif self._break_due and not around.has_text:
                self.flush()
        is_paragraph = name in _PARAGRAPHS
        has_text = is_paragraph or (around.has_text and name not in _BLOCKS)
        # A formula in MathML that is also given in TeX.
        skipped = around.skipped or (around.name == "alternatives" and name == "math")
        skipped = skipped or name in _NO_TEXT[""] or name in _NO_TEXT.get(around.name, ())
        if name == "outline" and not skipped:
            self._outline(element)
        is_prose = around.is_prose or is_paragraph
        self.open.append(_Open(element, name, verbatim, has_text, skipped, is_prose, len(self._line)))

    def _outline(self, element: etree._Element) -> None:
        """Adds an entry of an outline, whose text is in its attributes (OPML 2.0)."""
        self.flush()
        depth = sum(level.name == "outline" for level in self.open)
        for at, attribute in enumerate(("text", "_note")):
            text = " ".join((element.get(attribute) or "").split())
            if text:
                self._in_prose = True
                self.done.append(Paragraph(f"{'  ' * depth}{'  ' if at else '- '}{text}", True, gap=False))
        self._in_prose = False

    def text(self, text: str) -> None:
        current = self.open[-1]
        if not text or current.skipped:
            return
        if current.verbatim:
            self._line.append(text)
        elif not text.isspace():
            current.has_text = True
            self._break_due = False
            self._in_prose = self._in_prose or current.is_prose
            self._line.append(text)
        elif self._line:
            self._line.append(" ")

    def end(self) -> None:
        level = self.open.pop()
        around = self.open[-1]
        if level.verbatim:
            if not around.verbatim:
                self._add(_code("".join(self._line)))
        elif level.name == "code" and "\n" in (text := "".join(self._line[level.begin :])).strip():
            # Code on several lines is a block, as in JATS; on one line it is part of the sentence, as in DocBook.
            del self._line[level.begin :]
            self.flush()
            self._gap = True
            self._add(_code(text))
            self._gap = True
        elif level.name in _BLOCKS or not around.has_text:
            if level.name in _ESCAPED_HTML and not level.has_children and _TAG.search(raw := "".join(self._line)):
                self._in_prose = True
                self._add(page_text(page_blocks(parse_page(raw))))
            self._break_due = level.name not in _BLOCKS
            if level.name in _BLOCKS or level.has_children:
                self.flush()
                self._gap = True

    def flush(self) -> None:
        """Ends the current paragraph."""
        self._add(" ".join("".join(self._line).split()))

    def _add(self, text: str) -> None:
        if text:
            self.done.append(Paragraph(text, self._in_prose, self._gap))
            self._gap = False
        self._line = []
        self._break_due = self._in_prose = False


def _code(text: str) -> str:
    code = text.strip("\n").rstrip()
    return fenced(code) if code.strip() else ""


def _between(before: etree._Element | None, parent: etree._Element | None) -> str:
    """Returns the text of `parent` after its child element at or before `before`, or since the start of `parent`."""
    pieces: list[str] = []
    while before is not None and not isinstance(before.tag, str):
        # An entity that was not expanded; it stays as written if HTML does not define it.
        pieces += [before.tail or "", html5.get(f"{before.name};", before.text or "")]
        before = before.getprevious()
    first = before.tail if before is not None else parent.text if parent is not None else None
    return "".join([first or "", *reversed(pieces)])


def _is_prose(paragraphs: list[Paragraph]) -> bool:
    chars = sum(len(paragraph.text) for paragraph in paragraphs)
    prose = sum(len(p.text) for p in paragraphs if p.is_prose or len(p.text.split()) >= _SENTENCE_WORDS)
    return chars > 0 and prose >= _LEAST_PROSE * chars


def _text(paragraphs: list[Paragraph]) -> str:
    return "".join(f"\n\n{part.text}" if part.gap else f"\n{part.text}" for part in paragraphs).lstrip("\n")
