"""Web archives (WARC, ARC): what was retrieved, page by page, each read by its own type; read forward, as a stream."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from sheepop.data.extract.decompression import decompressed
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.page import decoded_as
from sheepop.data.extract.spool import Allowance, Counted, MemberError, Readable, spooled

_DOCUMENTS = frozenset({"response", "resource", "conversion"})
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OK = "200"
# How content of a type is named, whatever its address looks like; the suffix tells what reads it.
_SUFFIXES = {
    **dict.fromkeys(("text/html", "application/xhtml+xml", "application/vnd.wap.xhtml+xml"), ".html"),
    **dict.fromkeys(("text/xml", "application/xml", "application/rss+xml", "application/atom+xml"), ".xml"),
    **dict.fromkeys(("application/json", "application/ld+json"), ".json"),
    "application/pdf": ".pdf",
    "application/epub+zip": ".epub",
    "text/csv": ".csv",
    "text/markdown": ".md",
}
# What belongs to the looks of pages; the names of a type, or how they begin.
_NOT_READ = ("image/", "audio/", "video/", "font/", "application/font", "application/x-font", "text/css")
_SCRIPTS = frozenset(
    {"text/javascript", "application/javascript", "application/x-javascript", "application/ecmascript"}
)
_LONGEST_NAME = 100
# Text of another encoding is decoded as a whole; longer content is left as it is.
_LONGEST_DECODED = 2**26
_UTF8_MARK = b"\xef\xbb\xbf"


def extract_warc(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The documents of the archive's responses, resources and conversions, at places ``record N URL``.

    Responses other than 200 are refused one by one, as is what belongs to the looks of pages. Metadata: ``url``,
    ``date``, and ``truncated`` with the reason where the crawler kept only the beginning. Raises `ExtractionError`
    where the archive is damaged; what came before counts.
    """
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    allowance, number, documents = Allowance(content.size, context.config), 0, 0
    with content.open() as file, _plain(file) as plain:
        records = ArchiveIterator(Counted(plain, allowance), arc2warc=True)
        try:
            while (record := _next(records)) is not None:
                number += 1
                if record.rec_type in _DOCUMENTS:
                    documents += 1
                    if documents > context.config.max_members:
                        raise ExtractionError("bomb", f"over data.extract.max_members = {context.config.max_members:,}")
                    yield from _record(record, number, context)
                _finish(records, record)
        except _DamageError as error:
            raise ExtractionError("damaged", f"record {number + error.offset:,} {error}") from None
        except (ArchiveLoadFailed, ValueError, AttributeError, TypeError) as error:
            raise ExtractionError("damaged", f"what follows record {number:,} is not a record: {error}") from None


class _DamageError(Exception):
    """What is wrong with the present record, or with the next when `offset` is 1."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


@contextmanager
def _plain(file: BinaryIO) -> Iterator[Readable]:
    """The archive as it is unpacked; warcio itself would take a damaged end for the end."""
    head = file.read(len(_ZSTD))
    file.seek(0)
    if head.startswith((_GZIP, _ZSTD)):
        with decompressed(file) as plain:
            yield _Available(plain)
    else:
        yield file


class _Available:
    """Hands on what has been unpacked before it goes on, so that what stands before damage is not lost with it."""

    def __init__(self, plain: io.BufferedReader) -> None:
        self._plain = plain

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes, none at the end."""
        return self._plain.read1(count)


def _next(records: Any) -> Any | None:
    """The next record, None after the last."""
    begins = records.next_line is not None
    with redirect_stderr(io.StringIO()):
        record = next(records, None)
    if record is None and begins:
        raise _DamageError("breaks off", 1)
    if record is not None and record.length is None:
        raise _DamageError("does not say how long it is", 1)
    return record


def _finish(records: Any, record: Any) -> None:
    """Reads what is left of a record, and checks that it ends where it says."""
    # Of records that do not, warcio writes a line there, and counts them.
    with redirect_stderr(io.StringIO()):
        records.read_to_end()
    if getattr(record.raw_stream, "limit", 0) > 0:
        raise _DamageError("breaks off")
    if records.err_count:
        raise _DamageError("does not end where it says")


def _record(record: Any, number: int, context: Context) -> Iterator[Extracted | Refused]:
    headers = record.rec_headers
    url = " ".join((headers.get_header("WARC-Target-URI") or headers.get_header("uri") or "").split())
    place = f"record {number} {url}".rstrip()
    facts = {"url": url, "date": headers.get_header("WARC-Date") or ""}
    facts["truncated"] = headers.get_header("WARC-Truncated") or ""
    problem = _problem(record, context)
    if problem:
        yield Refused(place, *problem)
        return
    media_type, charset = _media_type(record)
    known = {name: value for name, value in facts.items() if value}
    limit = context.config.max_member_bytes
    try:
        with _payload(record, _name(url, media_type), limit, context) as payload:
            if payload.size:
                payload = _in_utf8(payload, charset) if charset and _is_text(media_type) else payload
                for item in context.inner(payload, place):
                    if isinstance(item, Extracted):
                        item = replace(item, metadata={**item.metadata, **known})
                    yield item
            else:
                yield Refused(place, "empty", "0 bytes")
    except MemberError as error:
        yield Refused(place, error.reason, error.detail)


def _problem(record: Any, context: Context) -> tuple[str, str] | None:
    """Reason and detail why a record is not read."""
    if record.rec_headers.get_header("WARC-Segment-Number"):
        return "unsupported", "it is one segment of several"
    if (record.length or 0) > context.config.max_member_bytes:
        return "oversized", f"over data.extract.max_member_bytes = {context.config.max_member_bytes:,}"
    if record.http_headers is not None and record.http_headers.get_statuscode() != _OK:
        return "unsupported", f"HTTP status {record.http_headers.statusline}"[:200]
    media_type, _ = _media_type(record)
    if media_type.startswith(_NOT_READ) or media_type in _SCRIPTS:
        return "unsupported", f"content of type {media_type} is not read from web archives"
    return None


def _media_type(record: Any) -> tuple[str, str]:
    """The type of the content in lower case, and the name of its encoding; either is empty when not stated."""
    headers = record.http_headers if record.http_headers is not None else record.rec_headers
    media_type, *parameters = (headers.get_header("Content-Type") or "").lower().split(";")
    stated = {name.strip(): value.strip(" \"'") for name, _, value in (one.partition("=") for one in parameters)}
    return media_type.strip(), stated.get("charset", "")


def _name(url: str, media_type: str) -> str:
    """A file name for the content at an address: the last part of its path, with the suffix of its type."""
    try:
        path = PurePosixPath(unquote(urlsplit(url).path))
    except ValueError:
        path = PurePosixPath()
    name = path.name[-_LONGEST_NAME:] or "index"
    suffix = _SUFFIXES.get(media_type) or ("" if path.suffix or media_type != "text/plain" else ".txt")
    return name if name.lower().endswith(suffix) else name + suffix


@contextmanager
def _payload(record: Any, name: str, limit: int, context: Context) -> Iterator[Content]:
    """The content of a record without the encodings of its transfer; raises `MemberError` when it cannot be had."""
    from warcio.bufferedreaders import ChunkedDataReader

    headers = record.http_headers
    stream = record.raw_stream
    encoding = ""
    if headers is not None:
        encoding = (headers.get_header("Content-Encoding") or "").strip().lower()
        if (headers.get_header("Transfer-Encoding") or "").strip().lower() == "chunked":
            stream = ChunkedDataReader(stream)
    with spooled(stream, name, limit, context.scratch) as content:
        packed = _PACKED.get(encoding)
        if packed is None:
            if encoding not in ("", "identity"):
                raise MemberError("unsupported", f"its content is encoded as {encoding[:40]}")
            yield content
            return
        with content.open() as file:
            # Some crawlers unpack the content and leave the header.
            head = file.read(2)
            if not head or not packed[0](head):
                yield content
                return
            file.seek(0)
            try:
                with spooled(packed[1](file), name, limit, context.scratch) as plain:
                    yield plain
            except MemberError:
                raise
            except ExtractionError as error:
                raise MemberError(error.reason, error.detail) from None


class _Deflated:
    """A stream packed by "deflate", with or without the header of zlib, as servers do either."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        head = file.read(2)
        file.seek(0)
        self._stream = zlib.decompressobj(zlib.MAX_WBITS if _has_zlib_header(head) else -zlib.MAX_WBITS)
        self._rest = b""

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes, none at the end; raises EOFError where the stream breaks off."""
        while not self._stream.eof:
            data = self._rest or self._file.read(2**16)
            out = self._stream.decompress(data, count)
            self._rest = self._stream.unconsumed_tail
            if out:
                return out
            if not data and not self._stream.eof:
                raise EOFError("it ends too early")
        return b""


def _has_zlib_header(head: bytes) -> bool:
    return len(head) == 2 and head[0] & 0x0F == 8 and int.from_bytes(head, "big") % 31 == 0


_PACKED: dict[str, tuple[Any, Any]] = {
    "gzip": (_GZIP.__eq__, decompressed),
    "x-gzip": (_GZIP.__eq__, decompressed),
    "deflate": (bool, _Deflated),
    "zstd": (_ZSTD.startswith, decompressed),
}


def _is_text(media_type: str) -> bool:
    """Whether the encoding that the server states counts; XML says itself in which it is."""
    return (media_type.startswith("text/") and media_type != "text/xml") or media_type == "application/xhtml+xml"


def _in_utf8(content: Content, charset: str) -> Content:
    """The content in UTF-8, where the encoding that the server states fits; it counts more than the page's own."""
    if content.size > _LONGEST_DECODED:
        return content
    with content.open() as file:
        decoded = decoded_as(file.read(), charset)
    return content if decoded is None else Content(content.name, data=_UTF8_MARK + decoded.text.encode("utf-8"))
