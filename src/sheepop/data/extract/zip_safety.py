"""Zip packages of documents (Office Open XML, EPUB), examined before a library unpacks them as a whole.

The libraries read whole parts into memory and believe what the package declares; so it is refused here when it is
encrypted, unpacks to more than it may, or brings definitions of entities along.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from sheepop.data.extract.interface import Content, Context, ExtractionError
from sheepop.data.extract.unpacking import Allowance

_LOCAL_HEADER_BYTES = 30
ENCRYPTED_FLAG = 0x1
# These two are bounded by zipfile while it unpacks; bzip2 and LZMA would come whole.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What may stand in a part before its first element, and where the markup must have begun.
_PROLOG_BYTES = 2**16
_SPACE = b" \t\r\n\xef\xbb\xbf\xff\xfe"
_NO_ELEMENT_YET = re.compile(rb"<\?.*?\?>|<!--.*?-->", re.DOTALL)
_EBCDIC = b"\x4c\x6f\xa7\x94"
_ENCODING = re.compile(rb"""<\?xml[^>]*?encoding\s*=\s*["']([^"']*)["']""")
_ENCODINGS = frozenset({b"utf-8", b"utf8", b"utf-16", b"us-ascii", b"ascii", b"iso-8859-1", b"windows-1252"})


@contextmanager
def opened_zip(content: Content) -> Iterator[zipfile.ZipFile]:
    """The zip in `content`.

    Raises `ExtractionError`: ``damaged`` when its directory cannot be read, ``bomb`` for members that share bytes, as
    those do that are made to unpack to far more than the archive holds.
    """
    with content.open() as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            raise ExtractionError("damaged", f"its directory cannot be read: {error}") from None
        with archive:
            end = 0
            for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
                if member.header_offset < end:
                    raise ExtractionError("bomb", "its members overlap")
                end = member.header_offset + _LOCAL_HEADER_BYTES + member.compress_size
            yield archive


@contextmanager
def safe_zip(content: Content, context: Context) -> Iterator[zipfile.ZipFile]:
    """The zip in `content`, of which every member may be unpacked without harm, one at a time.

    Raises `ExtractionError`: ``encrypted``; ``damaged`` when its directory cannot be read or a member in use breaks
    off; ``bomb`` for overlapping members, too many of them, or too much that they declare to unpack to (no more than
    that can come out); ``unsupported`` for rare ways of compression.
    """
    with opened_zip(content) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        Allowance(content.size, context.config).spend(size, members=len(members))
        for member in members:
            if member.flag_bits & ENCRYPTED_FLAG:
                raise ExtractionError("encrypted", "it needs a password")
            if member.compress_type not in _METHODS:
                raise ExtractionError("unsupported", f"its parts use compression method {member.compress_type}")
        try:
            yield archive
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ExtractionError("damaged", f"a part cannot be unpacked: {error}") from None


@contextmanager
def office_package(content: Content, context: Context) -> Iterator[zipfile.ZipFile]:
    """The same for Office Open XML, whose parts must not define entities (ECMA-376, part 2, 7.2.3)."""
    with safe_zip(content, context) as archive:
        for member in archive.infolist():
            with archive.open(member) as part:
                _refuse_definitions(member.filename, part.read(_PROLOG_BYTES))
        yield archive


def _refuse_definitions(name: str, beginning: bytes) -> None:
    """Raises when a part that is XML has a document type, or hides what stands before its first element."""
    # Without its NUL bytes, markup in UTF-16 and UTF-32 reads as ASCII.
    head = beginning.replace(b"\0", b"").lstrip(_SPACE)
    if head.startswith(_EBCDIC):
        raise ExtractionError("unsupported", f"{name} is in an encoding that Office does not write")
    if not head.startswith(b"<"):
        return
    encoding = _ENCODING.match(head)
    if encoding and encoding.group(1).lower() not in _ENCODINGS:
        raise ExtractionError("unsupported", f"{name} is in an encoding that Office does not write")
    while match := _NO_ELEMENT_YET.match(head):
        head = head[match.end() :].lstrip(_SPACE)
    if head[:2] in (b"<!", b"<?", b"<", b""):
        raise ExtractionError("bomb", f"{name} defines entities, or hides where it begins")
