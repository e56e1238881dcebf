"""XML of any kind: its text in the order of the file, one line or paragraph per element, read as a stream.

No entity outside the file is ever loaded. Documents (DocBook, JATS, TEI, DITA, feeds) become prose, known by their
outermost element or by their sentences; all else is data, and handed on as it stands, as code in the language ``xml``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from html.entities import html5
from itertools import islice
from typing import TYPE_CHECKING, Any

from sheepop.data.decoding import decode
from sheepop.data.extract.html import extract_html
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import fenced
from sheepop.data.extract.page import parse_page
from sheepop.data.extract.page_blocks import page_blocks, page_text, words

if TYPE_CHECKING:
    from lxml.etree import _Element

# Elements of DocBook, JATS, TEI, XHTML and feeds: of running text, of lines kept as they are, and of escaped HTML.
_PARAGRAPHS = words(
    "abstract caption chapter-title descript description entry head h1 h2 h3 h4 h5 h6 item lem line li p para paragraph"
    " seg simpara speech subtitle summary td term th title verse article-title"
)
_BLOCKS = _PARAGRAPHS | words(
    "appendix article back blockquote body book chapter div example figure fig front glossary informaltable"
    " itemizedlist l lg list listitem list-item note ol orderedlist quote-block row sec section sect1 sect2 sect3 table"
    " tbody tgroup thead tr ul variablelist varlistentry warning"
)
_DOCUMENTS = words("article book chapter dita feed fictionbook refentry rss tei tei.2 teicorpus")
_VERBATIM = words("code-block literallayout pre preformat programlisting screen synopsis")
_ESCAPED_HTML = words("content description encoded summary")
_TAG = re.compile(
    r"<(?:p|br|a|div|img|ul|ol|li|b|i|em|strong|span|h[1-6]|table|pre|code|blockquote)\b[^>]*>", re.IGNORECASE
)
_XHTML = "{http://www.w3.org/1999/xhtml}html"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_SNIFFED_BYTES = 2**16
_OUTER_SUBSET = re.compile(rb"<!DOCTYPE\s+[^\s\[>]+\s+(?:SYSTEM|PUBLIC)|<!ENTITY\s+(?:%|\S+\s+(?:SYSTEM|PUBLIC))")
_SENTENCE_WORDS = 6
_LEAST_PROSE = 0.5


def extract_xml(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """XHTML as a web page; any other XML as prose, in documents of limited length, or as code where it is data.

    Raises `ExtractionError`: ``bomb`` for entities that multiply, ``oversized`` for elements too deep or too long for
    the parser, ``damaged`` for what is not well-formed, ``empty`` for what has no elements.
    """
    root = next((str(element.tag) for _, element in _events(content)), None)
    if root is None:
        raise ExtractionError("empty", "the file has no elements")
    if root == _XHTML:
        yield from extract_html(content, context)
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
        with content.open() as file:
            decoded = decode(file.read())
        yield Extracted(decoded.text, kind="code", language="xml", metadata={"encoding": decoded.encoding})
    elif paragraphs:
        yield Extracted(_text(paragraphs), place=f"part {number + 1}" if number else "")


@dataclass(slots=True)
class Paragraph:
    """A paragraph of text; `is_prose` by its element, `gap` tells of an empty line before it."""

    text: str
    is_prose: bool
    gap: bool


@dataclass(slots=True)
class _Open:
    """An element that is being read; its text begins at `begin` in the line, or is `skipped`."""

    name: str
    verbatim: bool
    has_text: bool
    skipped: bool
    begin: int
    has_children: bool = False


def xml_paragraphs(content: Content) -> Iterator[Paragraph]:
    """The paragraphs of the file as they are read; raises `ExtractionError` as `extract_xml` does."""
    flow = _Flow()
    open_elements: list[_Element] = []
    events = _events(content)
    for event, element in events:
        if event == "start":
            if open_elements and element.getparent() is not open_elements[-1]:
                # An error in what follows explains it better.
                deque(events, maxlen=0)
                raise ExtractionError("unsupported", "it defines entities with elements far from its beginning")
            open_elements.append(element)
            flow.text(_between(element.getprevious(), element.getparent()))
            flow.start(element)
        else:
            flow.text(_between(element[-1] if len(element) else None, element))
            flow.end()
            _forget(open_elements.pop())
        yield from flow.finished()
    yield from flow.finished(at_end=True)


def _events(content: Content) -> Iterator[tuple[str, _Element]]:
    """The beginnings and ends of the elements of a file in their order."""
    from lxml import etree

    head = content.head(_SNIFFED_BYTES).replace(b"\0", b"")
    # Entities of the file's own are expanded by the parser, within its limits. Where some are defined outside, it would
    # have to stop at their names; then none is expanded, and those that HTML knows too are put in here.
    settings: Any = {
        "resolve_entities": False if _OUTER_SUBSET.search(head) else "internal",
        "load_dtd": False,
        "no_network": True,
        "huge_tree": False,
        "remove_comments": True,
        "remove_pis": True,
    }
    events = ("start", "end")
    with content.open() as file:
        try:
            if b"<!ENTITY" in head:
                # Elements in entities find their place only when all is read.
                walk = etree.iterwalk(etree.parse(file, etree.XMLParser(**settings)), events=events)
                yield from ((event, node) for event, node in walk if isinstance(node.tag, str))
            else:
                yield from etree.iterparse(file, events=events, **settings)
        except etree.XMLSyntaxError as error:
            raise _problem(error, etree.ErrorTypes) from None


class _Flow:
    """Text and the borders of elements become paragraphs.

    An element that stands within text belongs to its line; an element between others stands for itself.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._line: list[str] = []
        self._done: list[Paragraph] = []
        self._break_due = self._gap = self._in_prose = False

    def start(self, element: _Element) -> None:
        name = str(element.tag).rpartition("}")[2].lower()
        parent = self._open[-1] if self._open else None
        verbatim = name in _VERBATIM or element.get(_SPACE) == "preserve"
        if parent is not None:
            parent.has_children = True
            verbatim = verbatim or parent.verbatim
        if parent is None or not parent.verbatim:
            if verbatim or name in _BLOCKS:
                self._flush()
                self._gap = True
            elif self._break_due and parent is not None and not parent.has_text:
                self._flush()
        # A formula in MathML beside the same in TeX.
        skipped = parent is not None and (parent.skipped or (parent.name == "alternatives" and name == "math"))
        in_text = name in _PARAGRAPHS or (parent is not None and parent.has_text and name not in _BLOCKS)
        self._open.append(_Open(name, verbatim, in_text, skipped, len(self._line)))

    def text(self, text: str) -> None:
        if not text or not self._open:
            return
        current = self._open[-1]
        if current.skipped:
            return
        if current.verbatim:
            self._line.append(text)
        elif not text.isspace():
            current.has_text = True
            self._break_due = False
            self._in_prose = self._in_prose or any(level.name in _PARAGRAPHS for level in self._open)
            self._line.append(text)
        elif self._line:
            self._line.append(" ")

    def end(self) -> None:
        level = self._open.pop()
        around = self._open[-1] if self._open else None
        if level.verbatim:
            if around is None or not around.verbatim:
                self._flush_code()
        elif level.name == "code" and "\n" in "".join(self._line[level.begin :]).strip():
            # In JATS a block of code, in DocBook and TEI, on one line, a part of the sentence.
            code = self._line[level.begin :]
            del self._line[level.begin :]
            self._flush()
            self._line = code
            self._gap = True
            self._flush_code()
            self._gap = True
        elif around is None or level.name in _BLOCKS or not around.has_text:
            is_block = around is None or level.name in _BLOCKS
            if level.name in _ESCAPED_HTML and not level.has_children:
                self._render()
            self._break_due = not is_block
            if is_block or level.has_children:
                self._flush()
                self._gap = True

    def finished(self, *, at_end: bool = False) -> list[Paragraph]:
        if at_end:
            self._flush()
        done, self._done = self._done, []
        return done

    def _flush(self) -> None:
        self._add(" ".join("".join(self._line).split()))

    def _flush_code(self) -> None:
        code = "".join(self._line).strip("\n").rstrip()
        self._add(fenced(code) if code.strip() else "")

    def _render(self) -> None:
        """Escaped HTML, as feeds carry it, replaced by its text."""
        raw = "".join(self._line)
        if _TAG.search(raw):
            self._line = []
            self._in_prose = True
            self._add(page_text(page_blocks(parse_page(raw))))

    def _add(self, text: str) -> None:
        if text:
            self._done.append(Paragraph(text, self._in_prose, self._gap))
            self._gap = False
        self._line = []
        self._break_due = self._in_prose = False


def _between(before: _Element | None, parent: _Element | None) -> str:
    """The text of `parent` that ends behind its child `before`, since the element before or the start of `parent`."""
    pieces: list[str] = []
    while before is not None and not isinstance(before.tag, str):
        pieces += [before.tail or "", _named(before)]
        before = before.getprevious()
    first = before.tail if before is not None else parent.text if parent is not None else None
    return "".join([first or "", *reversed(pieces)])


def _named(entity: _Element) -> str:
    """The character of an entity that was not expanded; one that HTML does not know stays as it was written."""
    return html5.get(f"{entity.name};", entity.text or "")


def _forget(element: _Element) -> None:
    """Frees an element that was read, and all before it but the text behind itself, which was not."""
    element.clear(keep_tail=True)
    while element.getprevious() is not None:
        del element.getparent()[0]


def _problem(error: Any, kinds: Any) -> ExtractionError:
    message = str(error.msg)
    if error.code == kinds.ERR_ENTITY_LOOP or "amplification" in message:
        return ExtractionError("bomb", "its entities expand without end")
    if error.code == kinds.ERR_RESOURCE_LIMIT:
        return ExtractionError("oversized", message)
    return ExtractionError("damaged", message)


def _is_prose(paragraphs: list[Paragraph]) -> bool:
    chars = sum(len(paragraph.text) for paragraph in paragraphs)
    prose = sum(len(p.text) for p in paragraphs if p.is_prose or len(p.text.split()) >= _SENTENCE_WORDS)
    return chars > 0 and prose >= _LEAST_PROSE * chars


def _text(paragraphs: list[Paragraph]) -> str:
    pieces = (part for paragraph in paragraphs for part in ("\n\n" if paragraph.gap else "\n", paragraph.text))
    return "".join(islice(pieces, 1, None))
