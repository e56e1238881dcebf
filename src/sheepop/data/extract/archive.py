"""Archives and compressed files: their members, one at a time, never written to disk under the names they give.

How much comes out is bounded by the size of the archive. What is encrypted, damaged, a link or named as if to leave
the archive is refused by itself, and the other members are read.
"""

from __future__ import annotations

import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, cast

from sheepop.data.discovery import name_refusal
from sheepop.data.extract.decompression import decompressed
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.magic import is_tar_header
from sheepop.data.extract.spool import Allowance, Counted, MemberError, Readable, spooled
from sheepop.data.extract.zip_safety import ENCRYPTED_FLAG, opened_zip

_TAR_BLOCK = 512
_LONGEST_TAR_HEADER = 2**20
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_SEPARATOR = re.compile(r"[/\\]")
_DRIVE = re.compile(r"[A-Za-z]:")


def extract_zip(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The members of a zip file in the order of its directory.

    Raises `ExtractionError`: ``damaged`` when the directory cannot be read, ``bomb`` for members that overlap, too
    many members, or too much that they unpack to.
    """
    allowance, screen = Allowance(content.size, context.config), _Screen(context.config.max_members)
    with opened_zip(content) as archive:
        for member in archive.infolist():
            verdict = screen.verdict(member.filename, is_folder=member.is_dir())
            yield from verdict or ()
            if verdict is None:
                yield from _zip_member(archive, member, allowance, context)


def extract_tar(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The members of a tar archive, in order; raises `ExtractionError` where it is damaged."""
    with content.open() as file:
        yield from _tar_members(Counted(file, Allowance(content.size, context.config)), context)


def extract_compressed(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """What a gzip, bzip2, xz or zstd file holds: one file, or the members of the tar archive in it."""
    allowance = Allowance(content.size, context.config)
    with content.open() as file, decompressed(file) as plain:
        if is_tar_header(plain.peek(_TAR_BLOCK)[:_TAR_BLOCK]):
            yield from _tar_members(Counted(plain, allowance), context)
            return
        name = content.name.removesuffix(PurePosixPath(content.name).suffix)
        name = name if content.suffix in _COMPRESSED_SUFFIXES else content.name
        limit = context.config.max_member_bytes
        with spooled(Counted(plain, allowance), name, limit, context.scratch) as inner:
            yield from context.inner(inner, "")


class _Screen:
    """Decides by their names which members are not read, as discovery does for files; a folder is named once."""

    def __init__(self, max_members: int) -> None:
        self._max_members, self._members = max_members, 0
        self._named: set[str] = set()

    def verdict(self, name: str, *, is_folder: bool) -> list[Refused] | None:
        """None for a member that is read, else what to say of it: nothing for folders and what was said before."""
        self._members += 1
        if self._members > self._max_members:
            raise ExtractionError("bomb", f"over data.extract.max_members = {self._max_members:,} members")
        if is_folder:
            return []
        parts = _SEPARATOR.split(name)
        if not parts[0] or ".." in parts or _DRIVE.match(name):
            return [Refused(_place(name), "unsafe", "its name leads out of the archive")]
        for depth, part in enumerate(parts, 1):
            is_directory = depth < len(parts)
            refusal = None if part == "." and is_directory else name_refusal(part, is_directory=is_directory)
            if refusal and not is_directory:
                return [Refused(_place(name), *refusal)]
            if refusal:
                folder = _place("/".join(parts[:depth]) + "/")
                is_new = folder not in self._named
                self._named.add(folder)
                return [Refused(folder, *refusal)] if is_new else []
        return None


def _zip_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, allowance: Allowance, context: Context
) -> Iterator[Extracted | Refused]:
    place = _place(member.filename)
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        yield Refused(place, "unsafe", "it is a link or device, not a file")
    elif member.flag_bits & ENCRYPTED_FLAG:
        yield Refused(place, "encrypted", "it needs a password")
    else:
        try:
            source = archive.open(member)
        except NotImplementedError as error:
            yield Refused(place, "unsupported", str(error))
        except (zipfile.BadZipFile, ValueError) as error:
            yield Refused(place, "damaged", str(error))
        else:
            with source:
                yield from _member(Counted(source, allowance), member.filename, context)


def _tar_members(file: Counted, context: Context) -> Iterator[Extracted | Refused]:
    screen = _Screen(context.config.max_members)
    try:
        # Zeros in between are skipped: archives that were put behind each other are read to the last.
        with tarfile.open(
            fileobj=cast("Any", file), mode="r|", tarinfo=_Header, ignore_zeros=True, encoding="utf-8"
        ) as archive:
            for member in archive:
                cast("Any", archive).members = []  # it would keep them all
                verdict = screen.verdict(_printable(member.name), is_folder=member.isdir())
                yield from verdict or ()
                if verdict is None:
                    yield from _tar_member(archive, member, context)
    except tarfile.TarError as error:
        raise ExtractionError("damaged", f"it is not a tar archive from here on: {error}") from None


def _tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo, context: Context) -> Iterator[Extracted | Refused]:
    name = _printable(member.name)
    if member.issparse():
        yield Refused(_place(name), "unsupported", "it is a sparse file")
    elif not member.isreg():
        yield Refused(_place(name), "unsafe", "it is a link or device, not a file")
    else:
        source = archive.extractfile(member)
        assert source is not None
        with source:
            yield from _member(cast("Readable", source), name, context)


class _Header(tarfile.TarInfo):
    """Says where an archive is damaged; tarfile itself takes a damaged header for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if not bytes(buf).strip(b"\0") and buf:
            raise tarfile.EOFHeaderError("zeros, which may fill up part of a block")  # type: ignore[attr-defined]
        header = super().frombuf(buf, encoding, errors)
        describes = header.type in _DESCRIBING
        if header.size < 0 or (describes and header.size > _LONGEST_TAR_HEADER):
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


_DESCRIBING = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


def _member(source: Readable, name: str, context: Context) -> Iterator[Extracted | Refused]:
    try:
        with spooled(source, name, context.config.max_member_bytes, context.scratch) as inner:
            yield from context.inner(inner, _place(name))
    except MemberError as error:
        yield Refused(_place(name), error.reason, error.detail)


def _place(name: str) -> str:
    return f"member {name}"


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
