"""Web pages: the main text as Markdown, with headings, lists, tables and exact code, and what a page says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.main_text import main_blocks
from sheepop.data.extract.markdown import date_of, facts_of
from sheepop.data.extract.page import decode_page, parse_page
from sheepop.data.extract.page_blocks import page_blocks, page_text, words
from sheepop.data.extract.xml_text import root_name, xml_documents

if TYPE_CHECKING:
    from lxml.html import HtmlElement

_XHTML = "{http://www.w3.org/1999/xhtml}html"
_DATE_NAMES = words(
    "article:published_time og:published_time datepublished date dc.date dc.date.issued dcterms.created dcterms.date"
    " dcterms.issued citation_publication_date citation_date publish_date pubdate"
)


def extract_html(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose: the main text of the page as Markdown.

    Metadata: ``title``, ``language``, ``url``, ``date`` and ``author`` where the page states them, and ``encoding``.
    Raises `ExtractionError` for a page that is no text, is nested too deeply, or shows no text.
    """
    with content.open() as file:
        decoded = decode_page(file.read())
    page = parse_page(decoded.text)
    facts = {**_facts(page), "encoding": decoded.encoding}
    blocks = page_blocks(page)
    text = page_text(main_blocks(blocks, page))
    if not text:
        raise ExtractionError("empty", "the page shows no text")
    yield Extracted(text, metadata=facts)


def extract_xml(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """XHTML as a web page; any other XML as its text, or as source code where it is rather data.

    Raises `ExtractionError`: ``bomb`` for entities that multiply, ``oversized`` for elements too deep or too long for
    the parser, ``damaged`` for what is not well-formed.
    """
    root = root_name(content)
    if root == _XHTML:
        yield from extract_html(content, context)
    else:
        yield from xml_documents(content, root, context.config.max_document_bytes)


def _facts(page: HtmlElement) -> dict[str, str]:
    """What the page says of itself."""
    named: dict[str, str] = {}
    for element in page.iter("meta"):
        name = element.get("property") or element.get("name") or element.get("itemprop") or ""
        named.setdefault(name.lower(), element.get("content") or "")
    title = page.find(".//title")
    links = [link.get("href") for link in page.iter("link") if (link.get("rel") or "").lower() == "canonical"]
    facts = {
        "title": named.get("og:title") or ("" if title is None else title.text_content()),
        "language": page.get("lang") or page.get("xml:lang"),
        "url": (links[0] if links else "") or named.get("og:url"),
        "date": next(filter(None, (date_of(named.get(name)) for name in sorted(_DATE_NAMES))), ""),
        "author": named.get("author"),
    }
    return facts_of(facts)
