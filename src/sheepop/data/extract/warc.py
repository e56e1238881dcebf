"""Streams web archives (WARC, ARC) and extracts each retrieved page with the reader of its type."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from itertools import count
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from warcio.archiveiterator import ArchiveIterator
from warcio.bufferedreaders import ChunkedDataReader
from warcio.exceptions import ArchiveLoadFailed

from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused
from sheepop.data.extract.page import decoded_as
from sheepop.data.extract.unpacking import Allowance, Counted, MemberError, decompressed, spooled

_DOCUMENTS = frozenset({"response", "resource", "conversion"})
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OK = "200"
# The suffix for content of a type, whatever its address looks like; it selects the reader.
_SUFFIXES = {
    **dict.fromkeys(("text/html", "application/xhtml+xml", "application/vnd.wap.xhtml+xml"), ".html"),
    **dict.fromkeys(("text/xml", "application/xml", "application/rss+xml", "application/atom+xml"), ".xml"),
    **dict.fromkeys(("application/json", "application/ld+json"), ".json"),
    "application/pdf": ".pdf",
    "application/epub+zip": ".epub",
    "text/csv": ".csv",
    "text/markdown": ".md",
}
# Prefixes of types that are only for the layout of pages, and of media.
_NOT_READ = (
    *("image/", "audio/", "video/", "font/", "application/font", "application/x-font", "text/css", "text/javascript"),
    *("application/javascript", "application/x-javascript", "application/ecmascript"),
)
_LONGEST_NAME = 100
# Text in another encoding is decoded as a whole if it is no longer than this.
_LONGEST_DECODED = 2**26
_UTF8_MARK = b"\xef\xbb\xbf"


def extract_warc(content: Content, context: Context) -> Documents:
    """Yields the documents of the archive's responses, resources and conversions, at places ``record N URL``.

    Responses with a status other than 200 are refused one by one, and so are pictures, media, fonts, styles and
    scripts. Metadata: ``url``, ``date``, and ``truncated`` with the reason why the crawler kept only the beginning.
    Raises `ExtractionError` if the archive is damaged; the documents before the damage remain valid.
    """
    allowance, number = Allowance(content.size, context.config), 0
    is_packed = content.head(len(_ZSTD)).startswith((_GZIP, _ZSTD))
    with content.open() as file:
        # The file is unpacked here because warcio would take damage for the end of the archive. `read1` returns the
        # bytes unpacked so far, so that those before the damage are not lost.
        counted = Counted(decompressed(file).read1 if is_packed else file.read, allowance)
        try:
            for number, record in enumerate(_records(counted), 1):
                if record.rec_type in _DOCUMENTS:
                    allowance.spend(members=1)
                    yield from _record(record, number, context)
        except (ArchiveLoadFailed, ValueError, AttributeError, TypeError) as error:
            raise ExtractionError("damaged", f"the data after record {number:,} is not a record: {error}") from None


def _records(file: Counted) -> Iterator[Any]:
    """Yields the records; reads each to its end, and checks its stated length, before the next."""
    records = ArchiveIterator(file, arc2warc=True)
    for number in count(1):
        begins = records.next_line is not None
        # Warcio prints a line for each record with a wrong length, and counts these records.
        with redirect_stderr(io.StringIO()):
            record = next(records, None)
        if record is None and not begins:
            return
        if record is None:
            raise ExtractionError("damaged", f"record {number:,} ends too early")
        if record.length is None:
            raise ExtractionError("damaged", f"record {number:,} does not state its length")
        yield record
        with redirect_stderr(io.StringIO()):
            records.read_to_end()
        if getattr(record.raw_stream, "limit", 0) > 0:
            raise ExtractionError("damaged", f"record {number:,} ends too early")
        if records.err_count:
            raise ExtractionError("damaged", f"record {number:,} does not have the length that it states")


def _record(record: Any, number: int, context: Context) -> Documents:
    headers = record.rec_headers
    url = " ".join((headers.get_header("WARC-Target-URI") or headers.get_header("uri") or "").split())
    place = f"record {number} {url}".rstrip()
    facts = {"url": url, "date": headers.get_header("WARC-Date"), "truncated": headers.get_header("WARC-Truncated")}
    known = {name: value for name, value in facts.items() if value}
    media_type, charset = _media_type(record)
    try:
        _require_readable(record, media_type, context)
        with _payload(record, _name(url, media_type), context) as payload:
            if not payload.size:
                raise MemberError("empty", "0 bytes")
            for item in context.inner(_in_utf8(payload, media_type, charset), place):
                if isinstance(item, Extracted):
                    item = replace(item, metadata={**item.metadata, **known})
                yield item
    except MemberError as error:
        yield Refused(place, error.reason, error.detail)


def _require_readable(record: Any, media_type: str, context: Context) -> None:
    """Raises `MemberError` if a record must be refused."""
    if record.rec_headers.get_header("WARC-Segment-Number"):
        raise MemberError("unsupported", "it is one segment of several")
    if (record.length or 0) > context.config.max_member_bytes:
        raise MemberError("oversized", f"over data.extract.max_member_bytes = {context.config.max_member_bytes:,}")
    if record.http_headers is not None and record.http_headers.get_statuscode() != _OK:
        raise MemberError("unsupported", f"HTTP status {record.http_headers.statusline}"[:200])
    if media_type.startswith(_NOT_READ):
        raise MemberError("unsupported", f"content of type {media_type} is not read from web archives")


def _media_type(record: Any) -> tuple[str, str]:
    """Returns the media type and the charset in lower case; either is empty if it is not stated."""
    headers = record.http_headers if record.http_headers is not None else record.rec_headers
    media_type, *parameters = (headers.get_header("Content-Type") or "").lower().split(";")
    stated = {name.strip(): value.strip(" \"'") for name, _, value in (one.partition("=") for one in parameters)}
    return media_type.strip(), stated.get("charset", "")


def _name(url: str, media_type: str) -> str:
    """Returns a file name for the content of a URL: the last part of its path, with the suffix of its type."""
    try:
        path = PurePosixPath(unquote(urlsplit(url).path))
    except ValueError:
        path = PurePosixPath()
    name = path.name[-_LONGEST_NAME:] or "index"
    suffix = _SUFFIXES.get(media_type) or ("" if path.suffix or media_type != "text/plain" else ".txt")
    return name if name.lower().endswith(suffix) else name + suffix


@contextmanager
def _payload(record: Any, name: str, context: Context) -> Iterator[Content]:
    """Provides the content of a record without its HTTP encodings; raises `MemberError` if it cannot be decoded."""
    encoding, transfer = (
        (record.http_headers.get_header(header) or "").strip().lower() if record.http_headers is not None else ""
        for header in ("Content-Encoding", "Transfer-Encoding")
    )
    stream = ChunkedDataReader(record.raw_stream) if transfer == "chunked" else record.raw_stream
    limit = context.config.max_member_bytes
    with spooled(stream.read, name, limit, context.scratch) as content, content.open() as file:
        if encoding not in _ENCODINGS:
            raise MemberError("unsupported", f"its content is encoded as {encoding[:40]}")
        packed = _ENCODINGS[encoding]
        # Some crawlers unpack the content but keep the header.
        if packed is None or not content.size or content.head(len(packed)) != packed:
            yield content
            return
        try:
            with spooled(decompressed(file, encoding).read, name, limit, context.scratch) as plain:
                yield plain
        except ExtractionError as error:
            raise MemberError(error.reason, error.detail) from None


# The first bytes of content in an encoding; None if the content is not encoded.
_ENCODINGS: dict[str, bytes | None] = {
    **dict.fromkeys(("", "identity")),
    **dict.fromkeys(("gzip", "x-gzip"), _GZIP),
    **dict.fromkeys(("deflate", "br"), b""),
    "zstd": _ZSTD[:2],
}


def _in_utf8(content: Content, media_type: str, charset: str) -> Content:
    """Recodes text as UTF-8 if the charset of the server fits; it takes precedence over the page's own."""
    # XML declares its own encoding.
    is_text = media_type.startswith("text/") and media_type != "text/xml"
    if not charset or not (is_text or media_type == "application/xhtml+xml") or content.size > _LONGEST_DECODED:
        return content
    decoded = decoded_as(content.read(), charset)
    return content if decoded is None else Content(content.name, data=_UTF8_MARK + decoded.text.encode("utf-8"))
