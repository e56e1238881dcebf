"""Unpacks compressed files and members of containers, reading forward and counting the bytes.

Files of gzip, bzip2, xz and zstd may consist of several streams. Unlike the readers of the libraries, all of these
detect a file that ends too early, and none unpacks more than a few megabytes at a time.
"""

from __future__ import annotations

import bz2
import errno
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, ExtractionError, buffered

LEAST_EXPANSION_BYTES = 2**26
"""The number of bytes that may always be unpacked, however small the container is."""

_INPUT = 2**16
_OUTPUT = 2**20
# A kilobyte of zstd can unpack to 32 MiB, and its decompressor cannot be stopped in between.
_ZSTD_INPUT = 2**10
_LARGEST_WINDOW = 2**27
_LZMA_MEMORY = 2**28
_MAGIC_BYTES = 8
_MEMORY_BYTES = 2**24
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MemberError(ExtractionError):
    """One member of a container cannot be used; the following ones may."""


class Allowance:
    """The number of bytes and members that may still be unpacked from a container of `size` bytes."""

    def __init__(self, size: int, config: ExtractConfig) -> None:
        self._limit = self._left = max(int(config.max_expansion * size), LEAST_EXPANSION_BYTES)
        self._max_members = self._members_left = config.max_members

    def spend(self, num_bytes: int = 0, *, members: int = 0) -> None:
        """Subtracts bytes and members; raises `ExtractionError` with reason ``bomb`` if the allowance is exceeded."""
        self._left -= num_bytes
        self._members_left -= members
        if self._left < 0:
            raise ExtractionError("bomb", f"it unpacks to over {self._limit:,} bytes; see data.extract.max_expansion")
        if self._members_left < 0:
            raise ExtractionError("bomb", f"over data.extract.max_members = {self._max_members:,} members")


class Counted:
    """A reader that subtracts the bytes read from an allowance."""

    def __init__(self, read: Callable[[int], bytes], allowance: Allowance) -> None:
        self._read, self._allowance = read, allowance

    def read(self, count: int = -1, /) -> bytes:
        """Returns at most `count` bytes, none at the end."""
        data = self._read(count)
        self._allowance.spend(len(data))
        return data


def raise_if_full(error: Exception, scratch: Path) -> None:
    """Raises `StorageError`, which ends the build, if `error` means that the disk for temporary files is full."""
    if isinstance(error, OSError) and error.errno in _FULL:
        full = f"There is no room for temporary files in {scratch}: {error.strerror}"
        raise StorageError(f"{full}. Free some space there.") from None


@contextmanager
def spooled(read: Callable[[int], bytes], name: str, limit: int, scratch: Path) -> Iterator[Content]:
    """Reads all into memory, or a large file into `scratch`; raises `MemberError` if over `limit` bytes or damaged."""
    blocks, beginning = _blocks(read, limit), bytearray()
    for block in blocks:
        beginning += block
        if len(beginning) > _MEMORY_BYTES:
            break
    else:
        yield Content(name, data=bytes(beginning))
        return
    with NamedTemporaryFile(dir=scratch) as file:
        file.write(beginning)
        beginning.clear()
        file.writelines(blocks)
        file.flush()
        yield Content(name, path=Path(file.name))


def _blocks(read: Callable[[int], bytes], limit: int) -> Iterator[bytes]:
    total = 0
    try:
        for block in iter(partial(read, _OUTPUT), b""):
            total += len(block)
            if total > limit:
                raise MemberError("oversized", f"over data.extract.max_member_bytes = {limit:,}")
            yield block
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise MemberError("damaged", f"it cannot be unpacked: {error}") from None


def decompressed(file: BinaryIO, encoding: str = "") -> io.BufferedReader:
    """Returns a reader of the unpacked `file`, which raises `ExtractionError` if it is damaged or ends too early.

    Give `encoding` for ``br`` and ``deflate``, which have no signature; deflate may come with the header of zlib (RFC
    1950) or, from some servers, without. Otherwise the signature tells the format.
    """
    first = {"br": lambda _: _Brotli(), "deflate": _deflate}.get(encoding, _by_signature)
    return buffered(file, _plain_blocks(file, first))


def _plain_blocks(file: BinaryIO, first: Callable[[bytes], Any]) -> Iterator[bytes]:
    """Yields the unpacked streams of a file; `first` makes the decompressor of the first stream from its beginning."""
    data = file.read(_INPUT)
    for make in chain((first,), repeat(_by_signature)):
        stream = make(data)
        while not stream.eof:
            is_waiting = not data and getattr(stream, "needs_input", True)
            data = file.read(_INPUT) if is_waiting else data
            is_end = is_waiting and not data
            try:
                out = stream.decompress(data, _OUTPUT)
            except MemoryError:
                raise
            except Exception as error:
                # Each library raises its own errors.
                if "too much memory" in str(error) or "Memory usage limit" in str(error):
                    raise ExtractionError("unsupported", "unpacking it needs more memory than is allowed") from None
                raise ExtractionError("damaged", f"it cannot be unpacked: {error}") from None
            if is_end and not out and not stream.eof:
                raise ExtractionError("damaged", "it ends too early")
            # The decompressors of bzip2 and xz keep unused input themselves.
            data = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")
            if out:
                yield out
        # Tapes and some programs pad files with zeros.
        data = data.lstrip(b"\0")
        while len(data) < _MAGIC_BYTES and (more := file.read(_INPUT)):
            data = (data + more).lstrip(b"\0")
        if not data:
            return


class _Brotli:
    """Adapts Brotli's decompressor to the interface of the others; a stream ends with its file."""

    unused_data = b""

    def __init__(self) -> None:
        import brotli

        self._decompressor = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.is_finished())

    @property
    def needs_input(self) -> bool:
        return bool(self._decompressor.can_accept_more_data())

    def decompress(self, data: bytes, limit: int) -> bytes:
        return bytes(self._decompressor.process(data, output_buffer_limit=limit))


class _Zstd:
    """Adapts the decompressor of zstd to the interface of the others; it has no output limit, so inputs are small."""

    unconsumed_tail = b""

    def __init__(self) -> None:
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data + self.unconsumed_tail

    def decompress(self, data: bytes, _: int) -> bytes:
        self.unconsumed_tail = data[_ZSTD_INPUT:]
        return self._decompressor.decompress(data[:_ZSTD_INPUT])


def _deflate(beginning: bytes) -> Any:
    has_header = beginning[:1] and beginning[0] & 0x0F == 8 and int.from_bytes(beginning[:2], "big") % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _by_signature(beginning: bytes) -> Any:
    for magic, make in _FORMATS:
        if magic.match(beginning):
            return make()
    raise ExtractionError("damaged", "the data after its compressed data is not compressed")


_FORMATS: tuple[tuple[re.Pattern[bytes], Callable[[], Any]], ...] = (
    (re.compile(rb"\x1f\x8b"), partial(zlib.decompressobj, zlib.MAX_WBITS | 16)),
    (re.compile(rb"BZh"), bz2.BZ2Decompressor),
    (re.compile(rb"\xfd7zXZ\x00"), partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _LZMA_MEMORY)),
    # The second kind are skippable frames, which contain no data of the file.
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _Zstd),
)
