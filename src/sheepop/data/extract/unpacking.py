"""What comes out of containers, read forward and counted: compressed files as plain ones, members as content.

Of gzip, bzip2, xz and zstd several streams may stand in a row. Unlike the readers that come with the libraries, every
one of these notices a file that ends too early, and none unpacks more at a time than a few megabytes.
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
from sheepop.data.extract.interface import Content, ExtractionError

LEAST_EXPANSION_BYTES = 2**26
"""What the content of a container may always come to, however small the container is."""

_INPUT = 2**16
_OUTPUT = 2**20
# A kilobyte of zstd can stand for 32 MiB, and its decompressor cannot be stopped half-way.
_ZSTD_INPUT = 2**10
_LARGEST_WINDOW = 2**27
_LZMA_MEMORY = 2**28
_MAGIC_BYTES = 8
_MEMORY_BYTES = 2**24
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MemberError(ExtractionError):
    """One member of a container cannot be used; those after it may."""


class Allowance:
    """How many bytes and members may still come out of a container of `size` bytes."""

    def __init__(self, size: int, config: ExtractConfig) -> None:
        self._limit = self._left = max(int(config.max_expansion * size), LEAST_EXPANSION_BYTES)
        self._max_members = self._members_left = config.max_members

    def spend(self, num_bytes: int = 0, *, members: int = 0) -> None:
        """Takes bytes and members off; raises `ExtractionError` with reason ``bomb`` when they are not left."""
        self._left -= num_bytes
        self._members_left -= members
        if self._left < 0:
            raise ExtractionError("bomb", f"it unpacks to over {self._limit:,} bytes; see data.extract.max_expansion")
        if self._members_left < 0:
            raise ExtractionError("bomb", f"over data.extract.max_members = {self._max_members:,} members")


class Counted:
    """What `read` gives, taken off an allowance as it is read."""

    def __init__(self, read: Callable[[int], bytes], allowance: Allowance) -> None:
        self._read, self._allowance = read, allowance

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes, none at the end."""
        data = self._read(count)
        self._allowance.spend(len(data))
        return data


def raise_if_full(error: Exception, scratch: Path) -> None:
    """Raises `StorageError`, which ends the build, when `error` says that there is no room for temporary files."""
    if isinstance(error, OSError) and error.errno in _FULL:
        raise StorageError(
            f"There is no room for temporary files in {scratch}: {error.strerror}. Free some space there."
        ) from None


@contextmanager
def spooled(read: Callable[[int], bytes], name: str, limit: int, scratch: Path) -> Iterator[Content]:
    """All that `read` gives as content called `name`: in memory, or in a temporary file when it is large.

    Raises `MemberError` when it is longer than `limit` bytes or cannot be unpacked.
    """
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
    """What `file` unpacks to; reading it raises `ExtractionError` where the file is damaged or ends too early.

    `encoding` is ``br`` or ``deflate``, which have no signature, the latter with the header of zlib (RFC 1950) or,
    as some servers send it, without; otherwise the signature tells the format.
    """
    first = {"br": lambda _: _Brotli(), "deflate": _deflate}.get(encoding, _by_signature)
    return buffered(file, _plain_blocks(file, first))


def buffered(file: BinaryIO, blocks: Iterator[bytes]) -> io.BufferedReader:
    """A file of the bytes that `blocks`, none of them empty, makes of another, which is closed with it."""
    return io.BufferedReader(_Blocks(file, blocks), _OUTPUT)


class _Blocks(io.RawIOBase):
    def __init__(self, file: BinaryIO, blocks: Iterator[bytes]) -> None:
        self._file, self._blocks, self._out = file, blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._out = self._out or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _plain_blocks(file: BinaryIO, first: Callable[[bytes], Any]) -> Iterator[bytes]:
    """What the streams in a file unpack to; `first` makes the decompressor of the first by its beginning."""
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
                # Every library has its own.
                if "too much memory" in str(error) or "Memory usage limit" in str(error):
                    raise ExtractionError("unsupported", "unpacking it needs more memory than is allowed") from None
                raise ExtractionError("damaged", f"it cannot be unpacked: {error}") from None
            if is_end and not out and not stream.eof:
                raise ExtractionError("damaged", "it ends too early")
            # Those of bzip2 and xz keep themselves what they have not used yet.
            data = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")
            if out:
                yield out
        # Tapes and some programs fill files up with zeros.
        data = data.lstrip(b"\0")
        while len(data) < _MAGIC_BYTES and (more := file.read(_INPUT)):
            data = (data + more).lstrip(b"\0")
        if not data:
            return


class _Brotli:
    """Brotli's decompressor with the names of the others; a stream ends where its file does."""

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
    """The decompressor of zstd with the names of the others; it heeds no limit, so it is given little at a time."""

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
    raise ExtractionError("damaged", "what follows its compressed data is not compressed")


_FORMATS: tuple[tuple[re.Pattern[bytes], Callable[[], Any]], ...] = (
    (re.compile(rb"\x1f\x8b"), partial(zlib.decompressobj, zlib.MAX_WBITS | 16)),
    (re.compile(rb"BZh"), bz2.BZ2Decompressor),
    (re.compile(rb"\xfd7zXZ\x00"), partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _LZMA_MEMORY)),
    # The second kind are frames that hold no data but what a program notes for itself.
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _Zstd),
)
