"""Decodes the bytes of a web page and parses its text into a tree of elements."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from sheepop.data.charsets import codec_of
from sheepop.data.decoding import Decoded, decode
from sheepop.data.extract.interface import ExtractionError

if TYPE_CHECKING:
    from lxml.html import HtmlElement

# Settings of lxml's parsers: no other files, limits on size and depth, no comments and processing instructions.
SAFE = {"no_network": True, "huge_tree": False, "remove_comments": True, "remove_pis": True}
# How far to look for the declared encoding: somewhat further than the HTML standard does.
_HEAD_BYTES = 4096
_DECLARED = re.compile(rb"""(?i)<(?:meta\b[^>]*?\bcharset|\?xml\b[^>]*?\bencoding)\s*=\s*["']?\s*([\w.:-]+)""")
_NOT_FOR_PAGES = frozenset({"utf-7", "unicode-escape", "raw-unicode-escape", "idna", "punycode", "undefined", "hz"})


def decode_page(data: bytes, damage: list[int] | None = None) -> Decoded:
    """Decodes a page by, in this order, its byte order mark, UTF-8, the encoding that it declares, or detection.

    UTF-8 comes before the declaration because other encodings do not look like it by chance, while declarations are
    often left over from a template. For `damage` see `decode`. Raises `ExtractionError`.
    """
    declared = _DECLARED.search(data[:_HEAD_BYTES])
    if declared and not data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return decoded_as(data, declared.group(1).decode("ascii", "replace")) or decode(data, "", damage)
    return decode(data, "", damage)


def decoded_as(data: bytes, name: str) -> Decoded | None:
    """Decodes text with the named encoding; returns None if it is unknown, does not fit, or the bytes are UTF-8."""
    try:
        encoding = codec_of(name)
        # The declaration was found as ASCII bytes, so the page cannot be in a wide encoding.
        if encoding in _NOT_FOR_PAGES or encoding.startswith("utf"):
            return None
        # Encodings with escape sequences consist of ASCII bytes, so they look like UTF-8.
        if not encoding.startswith("iso2022"):
            with suppress(UnicodeDecodeError):
                data.decode("utf-8")
                return None
        text = data.decode(encoding)
        text.encode("utf-8")
    except (LookupError, ValueError, TypeError):
        return None
    return None if "\0" in text else Decoded(text, encoding.replace("-", "_"))


def parse_page(text: str) -> HtmlElement:
    """Parses and repairs a page with lxml; loads nothing and expands no entities that the page defines.

    Raises `ExtractionError` if the page exceeds a limit of the parser, which would drop the rest, or has no elements.
    """
    from lxml import etree, html

    parser = html.HTMLParser(encoding="utf-8", collect_ids=False, **SAFE)
    try:
        page = html.document_fromstring(text.encode("utf-8"), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        page = None
    for entry in parser.error_log.filter_from_fatals():
        if entry.type == etree.ErrorTypes.ERR_RESOURCE_LIMIT:
            raise ExtractionError("oversized", f"line {entry.line:,} of the page: {entry.message.partition(',')[0]}")
    if page is None:
        raise ExtractionError("empty", "the page has no elements")
    return page
