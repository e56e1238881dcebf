"""Extracts the main text of web pages as Markdown with headings, lists, tables and exact code, and their metadata.

If a page marks its main part or has one article, that is the main text. Otherwise trafilatura finds where the main text
begins and ends; between these borders everything is kept unchanged, except menus (lists of links) and side boxes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from lxml.html import HtmlElement

from sheepop.data.decoding import left_out
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError
from sheepop.data.extract.languages import words
from sheepop.data.extract.markdown import date_of, facts_of
from sheepop.data.extract.page import decode_page, parse_page
from sheepop.data.extract.page_blocks import Block, page_blocks, page_text

_DATE_NAMES = words(
    "article:published_time og:published_time datepublished date dc.date dc.date.issued dcterms.created dcterms.date"
    " dcterms.issued citation_publication_date citation_date publish_date pubdate"
)
# In scripts without spaces between words each character counts as one.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MARKUP = re.compile(r"[ >]*(?:```+\S*\n|-?\d+\. )?")
# Runs of this many words are compared to decide whether a block is part of the main text.
_RUN = 4
# Blocks of at least this many words can mark a border; shorter ones ("Home", "About") may occur anywhere.
_ANCHOR_WORDS = 8
_SHARE_FOUND = 0.6
# A list item or paragraph with a larger share of links than this is a menu.
_SHARE_LINKS = {"item": 0.6, "text": 0.9}
# In the main text, links of this many characters are references, and not a menu.
_LONG_LINK = 30
# Borders must enclose at least this share of the words that trafilatura finds.
_LEAST_WITHIN = 0.9
_LEAST_OF_MAIN = 0.5
_LEAST_OF_PAGE = 0.1
_LEAST_DECLARED_CHARS = 100
# Pages with more blocks are books or listings; the search would take minutes and gigabytes for them.
_MOST_BLOCKS = 20_000


def extract_html(content: Content, context: Context) -> Documents:
    """Yields one document of prose: the main text of the page as Markdown.

    Metadata: ``title``, ``language``, ``url``, ``date`` and ``author`` if the page states them, and ``encoding``.
    Raises `ExtractionError` if the page cannot be decoded, is nested too deeply, or shows no text.
    """
    damage: list[int] = []
    decoded = decode_page(content.read(), damage)
    page = parse_page(decoded.text)
    facts = {**_facts(page), "encoding": decoded.encoding}
    text = page_text(main_blocks(page_blocks(page), page))
    if not text:
        raise ExtractionError("empty", "the page shows no text")
    yield Extracted(text, metadata=facts)
    yield from left_out(damage)


def _facts(page: HtmlElement) -> dict[str, str]:
    named: dict[str, str] = {}
    for element in page.iter("meta"):
        name = element.get("property") or element.get("name") or element.get("itemprop") or ""
        named.setdefault(name.lower(), element.get("content") or "")
    title = page.find(".//title")
    links = [link.get("href") for link in page.iter("link") if (link.get("rel") or "").lower() == "canonical"]
    stated = {
        "title": named.get("og:title") or ("" if title is None else title.text_content()),
        "language": page.get("lang") or page.get("xml:lang"),
        "url": (links[0] if links else "") or named.get("og:url"),
        "date": next(filter(None, (date_of(named.get(name)) for name in sorted(_DATE_NAMES))), ""),
        "author": named.get("author"),
    }
    return facts_of(stated)


def main_blocks(blocks: Sequence[Block], page: HtmlElement) -> list[Block]:
    """Returns the blocks of `page` that are its main text; the search changes `page`, so do not use it afterwards."""
    declared = _declared(blocks)
    if declared and _chars(declared) >= _LEAST_OF_MAIN * _chars(blocks) and not any(map(_is_doubtful, declared)):
        # The search could not improve on this.
        return _with_title(blocks, declared)
    shown = _without_doubtful(blocks)
    lines = [_WORD.findall(line) for line in (_trafilatura_lines(page) if len(blocks) <= _MOST_BLOCKS else ())]
    _mark_found(blocks, lines)
    found = _between_borders(blocks, sum(map(len, lines)))
    if declared and _chars(declared) >= _LEAST_OF_MAIN * _chars(found):
        return _with_title(blocks, _without_doubtful(declared))
    return _with_title(blocks, found) if _chars(found) >= _LEAST_OF_PAGE * _chars(shown) else shown


def _declared(blocks: Sequence[Block]) -> list[Block]:
    """Returns the blocks of the marked main part, or of the one article that fills it; none if they are too short."""
    main = [block for block in blocks if block.in_main]
    around = main or blocks
    articles = {block.article for block in around} - {0}
    if len(articles) == 1:
        article = [block for block in around if block.article]
        if not main or _chars(article) >= _LEAST_OF_MAIN * _chars(main):
            main = article
    return main if _chars(main) >= _LEAST_DECLARED_CHARS else []


def _mark_found(blocks: Sequence[Block], lines: list[list[str]]) -> None:
    """Sets `found` on each block whose words occur in these lines of main text."""
    whole = {tuple(line) for line in lines}
    runs = _runs([word for line in lines for word in line])
    for block in blocks:
        words = _words(block)
        if len(words) < _RUN:
            block.found = bool(words) and tuple(words) in whole
        else:
            own = _runs(words)
            block.found = len(own & runs) >= _SHARE_FOUND * len(own)


def _between_borders(blocks: Sequence[Block], num_words: int) -> list[Block]:
    """Returns the blocks between the first and the last block of main text; long blocks are the best borders."""
    sizes = [len(_words(block)) for block in blocks]
    found = [block.found for block in blocks]
    kept: list[int] = []
    for least in (_ANCHOR_WORDS, _RUN, 1):
        anchors = [at for at, size in enumerate(sizes) if found[at] and size >= least]
        if not anchors:
            continue
        first, last = anchors[0], anchors[-1]
        # Code and tables next to the main text almost always belong to it, and so does a heading above it.
        while first > 0 and (found[first - 1] or blocks[first - 1].kind in ("heading", "code", "table")):
            first -= 1
        while last + 1 < len(blocks) and (found[last + 1] or blocks[last + 1].kind in ("code", "table")):
            last += 1
        kept = [at for at in range(first, last + 1) if not _is_doubtful(blocks[at])]
        if sum(sizes[at] for at in kept) >= _LEAST_WITHIN * num_words:
            break
    return [blocks[at] for at in kept]


def _without_doubtful(blocks: Sequence[Block]) -> list[Block]:
    """Returns the blocks without the doubtful ones, or all of them if little else would be left."""
    inner = [block for block in blocks if not _is_doubtful(block)]
    return inner if _chars(inner) >= _LEAST_OF_PAGE * _chars(blocks) else list(blocks)


def _with_title(blocks: Sequence[Block], kept: list[Block]) -> list[Block]:
    """Returns `kept` with the page title in front, if the page has one title and it is above the kept blocks."""
    titles = [block for block in blocks if block.text.startswith("# ")]
    if kept and len(titles) == 1 and titles[0] not in kept and blocks.index(titles[0]) < blocks.index(kept[0]):
        return [titles[0], *kept]
    return kept


def _words(block: Block) -> list[str]:
    """Returns the words of a block without the Markdown marks of an item, quotation or code."""
    return _WORD.findall(_MARKUP.sub("", block.text, count=1))


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)}


def _is_doubtful(block: Block) -> bool:
    """Returns whether a block looks like a menu or a side box, and is not known to be main text."""
    is_list = (block.in_main or block.article) and block.chars >= _LONG_LINK
    is_menu = block.link_chars > _SHARE_LINKS.get(block.kind, 1.0) * block.chars and not is_list
    return (block.beside or is_menu) and not block.found


def _chars(blocks: Iterable[Block]) -> int:
    return sum(block.chars for block in blocks)


def _trafilatura_lines(page: HtmlElement) -> list[str]:
    """Returns the lines that trafilatura takes for the main text; none if it fails."""
    from trafilatura import bare_extraction

    # It logs a warning for each page without main text, which is an expected case here.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    try:
        found = bare_extraction(page, include_comments=False, include_tables=True, with_metadata=False)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        # It failed on odd markup; the whole page is then rendered instead.
        return []
    lines: list[str] = []
    for body in (getattr(found, "body", None), getattr(found, "commentsbody", None)):
        for element in () if body is None else body.iter("p", "head", "item", "cell", "code", "quote"):
            lines += "".join(element.itertext()).splitlines()
    return lines
