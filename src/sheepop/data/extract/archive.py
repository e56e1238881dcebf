"""Reads archives and compressed files one member at a time, and never writes a member to disk under its own name.

The unpacked size is bounded relative to the size of the archive. A member that is encrypted, damaged, a link, or
whose name points outside the archive is refused alone; the other members are read. Document packages (Office Open
XML, EPUB) are checked before a library unpacks them, because the libraries trust the sizes that a package declares.
"""

from __future__ import annotations

import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, cast

from sheepop.data.discovery import name_refusal, printable
from sheepop.data.extract.detection import is_tar_header
from sheepop.data.extract.interface import (
    Content,
    Context,
    Documents,
    ExtractionError,
    Refused,
    Span,
    buffered,
    cut_units,
)
from sheepop.data.extract.unpacking import Allowance, Counted, MemberError, decompressed, spooled

_TAR_BLOCK = 512
_LONGEST_TAR_HEADER = 2**20
_TAR_READ, _TAR_END = 2**18, bytes(2 * _TAR_BLOCK)
_DESCRIBING = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_SEPARATOR = re.compile(r"[/\\]")
_DRIVE = re.compile(r"[A-Za-z]:")
_NO_FILE = ("unsafe", "it is a link or device, not a file")
_LOCAL_HEADER_BYTES = 30
_ENCRYPTED_FLAG = 0x1
# zipfile bounds its output for these two; it would unpack bzip2 and LZMA all at once.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# How many bytes of an XML part to check for a document type, and what may precede the first element.
_PROLOG_BYTES = 2**16
_SPACE = b" \t\r\n\xef\xbb\xbf\xff\xfe"
_NO_ELEMENT_YET = re.compile(rb"<\?.*?\?>|<!--.*?-->", re.DOTALL)
_EBCDIC = b"\x4c\x6f\xa7\x94"
_ENCODING = re.compile(rb"""<\?xml[^>]*?encoding\s*=\s*["']([^"']*)["']""")
_ENCODINGS = frozenset({b"utf-8", b"utf8", b"utf-16", b"us-ascii", b"ascii", b"iso-8859-1", b"windows-1252"})


class _Member(NamedTuple):
    """A member with its printable name; `refusal` is (reason, detail) if its content cannot be read."""

    name: str
    is_folder: bool
    refusal: tuple[str, str] | None
    open: Callable[[], IO[bytes]]


def extract_zip(content: Content, context: Context) -> Documents:
    """Yields the documents in the members of a zip file, in the order of its directory; raises `ExtractionError`."""
    with _opened_zip(content) as archive:
        yield from _documents(_zip_members(archive), content, context)


def cut_zip(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of members; see `Cutter`."""
    with _opened_zip(content) as archive:
        members = archive.infolist()
        if len(members) <= context.config.max_members:
            sizes = (_LOCAL_HEADER_BYTES + member.compress_size for member in members)
            yield from cut_units(sizes, part_bytes, "members")


def extract_tar(content: Content, context: Context) -> Documents:
    """Yields the documents in the members of a tar archive, in order; raises `ExtractionError` if it is damaged."""
    with content.section() as file:
        # The bytes of a span that is not the last are followed by another member, not by the end of the archive.
        ended = buffered(file, filter(None, chain(iter(partial(file.read, _TAR_READ), b""), [_TAR_END])))
        yield from _tar_documents(file if content.span is None else ended, content, context)


def cut_tar(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of members; see `Cutter`. None if a header is for all members that follow."""
    found: list[Span] = []
    begin = before = at = 0
    with content.open() as file, tarfile.open(fileobj=file, tarinfo=_Header, ignore_zeros=True) as archive:
        for at, member in enumerate(archive, 1):
            cast("Any", archive).members = []
            if archive.pax_headers or at > context.config.max_members:
                return
            if (size := member.offset - begin) >= part_bytes:
                found.append(Span(len(found), begin, member.offset, before, size))
                begin, before = member.offset, at - 1
    found.append(Span(len(found), begin, content.size, before, content.size - begin))
    yield from found


def extract_compressed(content: Content, context: Context) -> Documents:
    """Yields the documents of a gzip, bzip2, xz or zstd file, which contains one file or a tar archive."""
    with content.open() as file, decompressed(file) as plain:
        # The bytes between the members of a tar archive count too.
        counted = Counted(plain.read, Allowance(content.size, context.config))
        if is_tar_header(plain.peek(_TAR_BLOCK)[:_TAR_BLOCK]):
            yield from _tar_documents(counted, content, context)
            return
        name = content.name.removesuffix(PurePosixPath(content.name).suffix)
        name = name if content.suffix in _COMPRESSED_SUFFIXES else content.name
        with spooled(counted.read, name, context.config.max_member_bytes, context.scratch) as inner:
            yield from context.inner(inner, "")


def _documents(members: Iterator[_Member], content: Content, context: Context) -> Documents:
    """Yields the documents and refusals of the members of an archive, or of those in its span."""
    allowance, folders = Allowance(content.share, context.config), set[str]()
    span = content.span if content.span and content.span.unit == "members" else None
    for at, member in enumerate(islice(members, span.end if span else None)):
        if span and at < span.begin:
            # A folder that is skipped is reported with its first member, in an earlier span.
            folders.update(place for place, _ in filter(None, [_left_out(member.name)]))
            continue
        allowance.spend(members=1)
        if member.is_folder:
            continue
        place, refusal = _left_out(member.name) or (member.name, member.refusal)
        if place != member.name:
            # Each skipped folder is reported once.
            refusal = None if place in folders else refusal
            folders.add(place)
        elif refusal is None:
            try:
                with member.open() as source:
                    counted, limit = Counted(source.read, allowance), context.config.max_member_bytes
                    with spooled(counted.read, member.name, limit, context.scratch) as inner:
                        yield from context.inner(inner, f"member {place}")
            except MemberError as error:
                refusal = error.reason, error.detail
        if refusal:
            yield Refused(f"member {place}", *refusal)


def _left_out(name: str) -> tuple[str, tuple[str, str]] | None:
    """Returns the member, or its folder with a slash, and why `sheepop.data.discovery` skips it; None to read it."""
    parts = _SEPARATOR.split(name)
    if not parts[0] or ".." in parts or _DRIVE.match(name):
        return name, ("unsafe", "its name leads out of the archive")
    for depth, part in enumerate(parts, 1):
        is_directory = depth < len(parts)
        refusal = None if part == "." and is_directory else name_refusal(part, is_directory=is_directory)
        if refusal:
            return ("/".join(parts[:depth]) + "/" if is_directory else name), refusal
    return None


def _zip_members(archive: zipfile.ZipFile) -> Iterator[_Member]:
    for member in archive.infolist():
        refusal = ("encrypted", "it needs a password") if member.flag_bits & _ENCRYPTED_FLAG else None
        refusal = refusal if stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG) else _NO_FILE
        yield _Member(member.filename, member.is_dir(), refusal, partial(_opened, archive, member))


def _opened(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return archive.open(member)
    except NotImplementedError as error:
        raise MemberError("unsupported", str(error)) from None
    except (zipfile.BadZipFile, ValueError) as error:
        raise MemberError("damaged", str(error)) from None


def _tar_documents(file: Any, content: Content, context: Context) -> Documents:
    try:
        yield from _documents(_tar_members(file), content, context)
    except tarfile.TarError as error:
        raise ExtractionError("damaged", f"it is not a tar archive from here on: {error}") from None


def _tar_members(file: Any) -> Iterator[_Member]:
    # Zero blocks between archives are skipped, so that all of several concatenated archives are read.
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Header, ignore_zeros=True, encoding="utf-8") as archive:
        for member in archive:
            cast("Any", archive).members = []  # tarfile would keep them all in memory
            refusal = None if member.isreg() else _NO_FILE
            refusal = ("unsupported", "it is a sparse file") if member.issparse() else refusal
            open_member = cast("Any", partial(archive.extractfile, member))
            yield _Member(printable(member.name), member.isdir(), refusal, open_member)


class _Header(tarfile.TarInfo):
    """Raises an error for a damaged header, which tarfile itself takes for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if not bytes(buf).strip(b"\0") and buf:
            raise tarfile.EOFHeaderError("a block of zeros, perhaps a short one")  # type: ignore[attr-defined]
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _DESCRIBING and header.size > _LONGEST_TAR_HEADER):
            raise ExtractionError("damaged", f"a tar header gives a size of {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(cls, archive: Any) -> _Header:
        try:
            header = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.has_ended = True
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            if getattr(archive, "has_ended", False):
                raise
            raise ExtractionError("damaged", "it has no end-of-archive marker") from None
        except tarfile.HeaderError as error:
            raise ExtractionError("damaged", f"it is not a tar archive from here on: {error}") from None
        archive.has_ended = False
        return header


@contextmanager
def _opened_zip(content: Content) -> Iterator[zipfile.ZipFile]:
    """Opens a zip file; raises `ExtractionError`: ``damaged`` for its directory, ``bomb`` if its members overlap."""
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
    """Opens the zip file in `content` after checking that each member can be unpacked safely, one at a time.

    Raises `ExtractionError`: ``encrypted``; ``damaged`` for its directory or a member that is read; ``bomb`` if members
    overlap, are too many, or declare too many bytes (zipfile unpacks no more than declared); ``unsupported`` for rare
    compression methods.
    """
    with _opened_zip(content) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        Allowance(content.size, context.config).spend(size, members=len(members))
        for member in members:
            if member.flag_bits & _ENCRYPTED_FLAG:
                raise ExtractionError("encrypted", "it needs a password")
            if member.compress_type not in _METHODS:
                raise ExtractionError("unsupported", f"its parts use compression method {member.compress_type}")
        try:
            yield archive
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ExtractionError("damaged", f"a part cannot be unpacked: {error}") from None


@contextmanager
def office_package(content: Content, context: Context) -> Iterator[zipfile.ZipFile]:
    """Opens an Office Open XML file like `safe_zip`; its parts must not define entities (ECMA-376, part 2, 7.2.3)."""
    with safe_zip(content, context) as archive:
        for member in archive.infolist():
            with archive.open(member) as part:
                _refuse_definitions(member.filename, part.read(_PROLOG_BYTES))
        yield archive


def _refuse_definitions(name: str, beginning: bytes) -> None:
    """Raises an error if an XML part has a document type, or if its first element is not within `beginning`."""
    # Without NUL bytes, markup in UTF-16 and UTF-32 reads as ASCII.
    head = beginning.replace(b"\0", b"").lstrip(_SPACE)
    encoding = _ENCODING.match(head)
    if head.startswith(_EBCDIC) or (encoding and encoding[1].lower() not in _ENCODINGS):
        raise ExtractionError("unsupported", f"{name} is in an encoding that Office does not write")
    if not head.startswith(b"<"):
        return
    while match := _NO_ELEMENT_YET.match(head):
        head = head[match.end() :].lstrip(_SPACE)
    if head[:2] in (b"<!", b"<?", b"<", b""):
        raise ExtractionError("bomb", f"{name} defines entities, or hides where it begins")
