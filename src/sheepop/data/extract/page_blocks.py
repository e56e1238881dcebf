"""Turns a parsed HTML page into Markdown blocks in reading order: headings, paragraphs, items, code, tables.

The visible text is kept exactly; a link becomes its text. Scripts, controls, navigation and hidden elements are left
out. `sheepop.data.extract.html` decides which blocks are the main text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sheepop.data.extract.languages import words
from sheepop.data.extract.markdown import code_span, fenced, join, table
from sheepop.data.extract.page import decode_page, parse_page

if TYPE_CHECKING:
    from lxml.html import HtmlElement

BlockKind = Literal["text", "heading", "item", "code", "table"]

_LEFT_OUT = words(
    "applet area audio base basefont bgsound button canvas datalist dialog embed frame frameset head iframe input link"
    " map meta meter nav noembed noframes noscript object optgroup option param progress rp rt rtc script select source"
    " style svg template textarea track video"
)
_ROLES_LEFT_OUT = words("alertdialog dialog menu menubar navigation search toolbar tooltip")
_BESIDE = words("aside footer header")
_ROLES_BESIDE = words("banner complementary contentinfo")
# Words in the classes and ids of boxes beside the text, and the least share of a page's text that is no such box.
_BOX_NAMES = words(
    "ad ads advert advertisement banner breadcrumb breadcrumbs comment comments cookie cookies consent disqus footer"
    " masthead menu modal nav navbar navigation newsletter outbrain pager pagination popular popup promo recirc"
    " recommendations recommended related respond share sharing shares sidebar signup social sponsor sponsored"
    " subscribe subscription taboola toolbar trending widget"
)
_NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NO_BOX_SHARE = 0.8
_FORM_FIELDS = ("textarea", "select", "input")
_BLOCKS = words(
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure"
    " footer form frameset h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu ol optgroup p pre section"
    " summary table tbody td tfoot th thead tr ul"
)
_HEADINGS = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}
_LISTS = frozenset({"ol", "ul", "menu", "dir"})
_CODE_SPANS = frozenset({"code", "kbd", "samp"})
_VERBATIM = frozenset({"pre", "listing", "xmp", "plaintext"})
# A table with one of these elements is for layout, or too complex for rows of single lines.
_NOT_IN_CELLS = ("table", "pre", "h1", "h2", "h3", "dl", "blockquote")
_LONGEST_CELL = 2000
_WIDEST_SPAN = 1000
# The text of a link from a heading to itself, or from a note back to the text.
_PERMALINKS = words("¶ § # ¤ ∞ ⚓ 🔗 [link] [edit] ↩ ↩︎ ↩️ ↑ ^")
_SPACES = re.compile(r"[ \t\n\r\f]+")
# An explicit line break; a parsed page cannot contain NUL.
_BREAK = "\0"
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_LANGUAGE = re.compile(
    r"\b(?:language|lang|highlight-source|highlight|brush:)[- ]?([\w+#.-]+)|\bsourceCode ([\w+#.-]+)"
)
_NO_LANGUAGE = words("default none text plaintext plain txt notranslate nohighlight")
_LINE_NUMBERS = re.compile(r"\b(?:linenos?|linenodiv|line-?numbers?|gutter)\b")
_EXPONENT = re.compile(r"[-+−]?(?:\d+|\w)")


@dataclass(slots=True, eq=False)
class Block:
    """A piece of the page as Markdown; `chars` and `link_chars` count characters other than white space.

    `in_main` says that it is in the declared main part; `article` is the number of its article (0: none); `beside` says
    that it is in a header, footer or aside outside of these, or in a box of any place whose name says so. `found` says
    that a search took it for main text.
    """

    text: str
    kind: BlockKind
    chars: int
    link_chars: int
    in_main: bool
    article: int
    beside: bool
    found: bool = False


def page_blocks(root: HtmlElement) -> list[Block]:
    """Returns the blocks of a page or of a part of one."""
    page = _Page(len(root.text_content()))
    page.element(root)
    page.flush()
    return page.blocks


def blocks_of(data: bytes) -> list[Block]:
    """Returns the blocks of a page from its bytes; raises `ExtractionError`."""
    return page_blocks(parse_page(decode_page(data).text)) if data.strip() else []


def page_text(blocks: Iterable[Block]) -> str:
    """Returns the blocks as one Markdown text."""
    return join((block.kind, block.text) for block in blocks)


class _Page:
    """Walks over the elements and collects text in `_pieces` until a block ends."""

    def __init__(self, chars: int = 0) -> None:
        self.blocks: list[Block] = []
        self._chars = chars
        self._pieces: list[str] = []
        self._indent = self._marker = self._heading = ""
        # The number of the next item; None if items have dashes.
        self._number: int | None = None
        self._in_main = self._beside = self._in_link = False
        self._article = self._articles = self._link_chars = 0

    def element(self, node: HtmlElement) -> None:
        """Adds an element and its content; the text after it belongs to its parent."""
        tag = node.tag
        if not isinstance(tag, str):
            return
        tex = _formula(node, tag)
        if tex:
            self._pieces.append(f"${tex}$")
        elif _is_left_out(node, tag):
            return
        elif tag in _VERBATIM or (tag == "code" and node.find(".//br") is not None):
            self.flush()
            code = _verbatim(node)
            if code.strip():
                self._add(fenced(code, _code_language(node)), "code", 0)
        elif tag in _CODE_SPANS:
            text = " ".join(node.text_content().split())
            if self._in_link or node.find(".//a") is not None:
                self._link_chars += len(text.replace(" ", ""))
            if text:
                self._pieces.append(text if self._heading else code_span(text))
        elif tag == "table":
            self.flush()
            self._table(node)
        elif tag in _BLOCKS:
            self._block(node, tag)
        elif tag == "br":
            self._pieces.append(_BREAK)
        elif tag == "a":
            around, self._in_link = self._in_link, True
            if node.text_content().strip() not in _PERMALINKS:
                self._inside(node)
            self._in_link = around
        elif tag == "sup" and _EXPONENT.fullmatch(raised := node.text_content().strip()):
            if self._in_link or node.find(".//a") is not None:
                # A reference to a note.
                self._text(f"[{raised}]")
            else:
                before = self._pieces[-1][-1] if self._pieces else ""
                self._text(f"^{raised}" if before.isalnum() or before == ")" else raised)
        else:
            self._inside(node)

    def flush(self) -> None:
        """Ends the current block and adds it, if it has text."""
        raw, self._pieces = "".join(self._pieces), []
        link_chars, self._link_chars = self._link_chars, 0
        lines = [line.strip(" ") for line in _SPACES.sub(" ", raw).split(_BREAK)]
        # Like a browser, do not collapse no-break spaces; they become ordinary spaces only now.
        text = "\n".join(line.replace("\xa0", " ").rstrip() for line in lines).strip("\n")
        if not text.strip():
            return
        if self._heading:
            text = self._heading + " ".join(text.split())
        kind: BlockKind = "heading" if self._heading else "item" if self._marker else "text"
        rest = self._indent + " " * len(self._marker)
        first, *more = text.split("\n")
        text = "\n".join([self._indent + self._marker + first, *(rest + line if line else "" for line in more)])
        self._indent, self._marker = rest, ""
        self._add(text, kind, link_chars)

    def _add(self, text: str, kind: BlockKind, link_chars: int) -> None:
        chars = len(text) - sum(map(text.count, " \n"))
        self.blocks.append(Block(text, kind, chars, link_chars, self._in_main, self._article, self._beside))

    def _text(self, text: str | None) -> None:
        if text:
            self._pieces.append(text)
            if self._in_link:
                self._link_chars += len("".join(text.split()))

    def _inside(self, node: HtmlElement) -> None:
        self._text(node.text)
        for child in node:
            self.element(child)
            self._text(child.tail)

    def _block(self, node: HtmlElement, tag: str) -> None:
        if self._heading and tag not in _HEADINGS:
            # A heading stays one line, even if it contains block elements.
            self._text(" ")
            self._inside(node)
            self._text(" ")
            return
        self.flush()
        around = self._in_main, self._beside, self._article, self._heading
        indent, marker, number, count = self._indent, self._marker, self._number, len(self.blocks)
        role = node.get("role")
        if not (self._in_main or self._article):
            self._beside = self._beside or tag in _BESIDE or role in _ROLES_BESIDE
        self._beside = self._beside or self._is_box(node)
        self._in_main = self._in_main or tag == "main" or role == "main"
        if tag == "article" and not self._article:
            self._articles += 1
            self._article = self._articles
        if tag in _HEADINGS:
            self._heading = _HEADINGS[tag]
        elif tag == "li":
            if number is not None:
                number = _integer(node.get("value"), number)
                self._number = number + 1
            self._indent, self._marker = indent + " " * len(marker), "- " if number is None else f"{number}. "
        elif tag in _LISTS:
            self._number = _integer(node.get("start"), 1) if tag == "ol" else None
        elif tag == "blockquote":
            self._indent, self._marker = (indent, f"{marker}> ") if marker else (f"{indent}> ", "")
        self._inside(node)
        self.flush()
        self._in_main, self._beside, self._article, self._heading = around
        if tag in _LISTS:
            self._number = number
        elif tag in ("li", "blockquote"):
            # The marker of the enclosing item was written with the first block inside, or is still to be written.
            is_due = len(self.blocks) == count
            self._indent, self._marker = (indent, marker) if is_due else (indent + " " * len(marker), "")

    def _is_box(self, node: HtmlElement) -> bool:
        """Returns whether a form, or the name of an element, shows that it is a box beside the text."""
        if node.tag == "form":
            is_named = any(field.get("type") not in ("hidden", "submit") for field in node.iter(*_FORM_FIELDS))
        else:
            names = _NAME_WORD.findall(f"{node.get('class', '')} {node.get('id', '')}")
            is_named = any(name.lower() in _BOX_NAMES for name in names)
        # A whole page may be said to have comments, or be in a form.
        return is_named and node.find(".//h1") is None and len(node.text_content()) < _NO_BOX_SHARE * self._chars

    def _table(self, node: HtmlElement) -> None:
        caption = node.find("caption")
        if caption is not None:
            self._block(caption, "caption")
        rows = [row for row in node.iterdescendants("tr") if next(row.iterancestors("table")) is node]
        cells = [[cell for cell in row if cell.tag in ("td", "th")] for row in rows]
        if _is_layout(node, cells):
            for cell in (cell for row in cells for cell in row if not _has_line_numbers(cell)):
                self._block(cell, "td")
            return
        page = _Page()
        text = table(_grid([[(page.cell(cell), cell) for cell in row] for row in cells]))
        if text:
            self._add(text, "table", sum(block.link_chars for block in page.blocks))

    def cell(self, cell: HtmlElement) -> str:
        """Returns the text of a table cell."""
        start = len(self.blocks)
        if not _is_left_out(cell, "td"):
            self._inside(cell)
            self.flush()
        return " ".join(block.text for block in self.blocks[start:])


def _formula(node: HtmlElement, tag: str) -> str:
    """Returns the TeX of a formula, or an empty string if the page does not give it."""
    tex: str | None = None
    if tag == "math":
        notes = [note for note in node.iter("annotation") if (note.get("encoding") or "").endswith("tex")]
        tex = notes[0].text_content() if notes else node.get("alttext")
    elif tag == "script" and (node.get("type") or "").startswith("math/tex"):
        tex = node.text_content()
    elif tag == "img" and re.search(r"\b(?:tex|latex|math)\b", (node.get("class") or "").replace("-", " ")):
        tex = node.get("alt")
    return " ".join((tex or "").split())


def _is_left_out(node: HtmlElement, tag: str) -> bool:
    if tag in _LEFT_OUT:
        return True
    if not node.attrib:
        return False
    is_hidden = node.get("aria-hidden") == "true" or node.get("hidden", "until-found") != "until-found"
    return is_hidden or node.get("role") in _ROLES_LEFT_OUT or _HIDDEN.search(node.get("style") or "") is not None


def _integer(text: str | None, default: int) -> int:
    return int(text) if text and re.fullmatch(r"\s*-?\d{1,9}\s*", text) else default


def _verbatim(node: HtmlElement) -> str:
    """Returns the exact lines of preformatted text, without line numbers."""
    pieces: list[str] = []

    def gather(part: HtmlElement) -> None:
        pieces.append(part.text or "")
        for child in part:
            tag = child.tag
            if isinstance(tag, str) and not _is_left_out(child, tag) and not _has_line_numbers(child):
                if tag == "br":
                    pieces.append("\n")
                gather(child)
                if tag in _BLOCKS and not "".join(pieces[-2:]).endswith("\n"):
                    pieces.append("\n")
            pieces.append(child.tail or "")

    gather(node)
    # HTML ignores one line break directly after the tag.
    return "".join(pieces).removeprefix("\n").replace("\r\n", "\n").replace("\xa0", " ").rstrip()


def _has_line_numbers(node: HtmlElement) -> bool:
    return _LINE_NUMBERS.search(node.get("class") or "") is not None


def _code_language(node: HtmlElement) -> str:
    """Returns the language named by a class of the code element, its ``code`` children, or the boxes around it."""
    around = [part for part in node.iterancestors() if part.tag in ("div", "figure", "td")][:3]
    for part in (node, *node.iterchildren("code"), *around):
        if match := _LANGUAGE.search(part.get("class") or ""):
            name = (match[1] or match[2]).lower()
            return "" if name in _NO_LANGUAGE else name
    return ""


def _is_layout(node: HtmlElement, rows: list[list[HtmlElement]]) -> bool:
    return (
        node.get("role") in ("presentation", "none")
        or len(rows) < 2
        or max(map(len, rows)) < 2
        or next(node.iterdescendants(*_NOT_IN_CELLS), None) is not None
        or any(len(cell.text_content()) > _LONGEST_CELL for row in rows for cell in row)
    )


def _grid(rows: list[list[tuple[str, HtmlElement]]]) -> list[list[str]]:
    """Returns the cell texts by column; a cell with spans fills its first place, and leaves the others empty."""
    grid: list[list[str]] = []
    covered: dict[int, int] = {}
    for row in rows:
        line: list[str] = []
        for text, cell in (*row, ("", None)):
            while covered.get(len(line), 0) > 0:
                covered[len(line)] -= 1
                line.append("")
            if cell is not None:
                height = _span(cell, "rowspan")
                texts = [text] + [""] * (_span(cell, "colspan") - 1)
                if height > 1:
                    covered.update(dict.fromkeys(range(len(line), len(line) + len(texts)), height - 1))
                line += texts
        grid.append(line)
    return grid


def _span(cell: HtmlElement, name: str) -> int:
    return max(1, min(_integer(cell.get(name), 1), _WIDEST_SPAN))
