"""Compressed files as plain ones that are read forward: gzip, bzip2, xz and zstd, also several streams in a row.

Unlike the readers that come with the libraries, every one of these notices a file that ends too early, and none
unpacks more at a time than a few megabytes.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from sheepop.data.extract.interface import ExtractionError

_INPUT = 2**16
_OUTPUT = 2**20
# A kilobyte of zstd can stand for 32 MiB, and its decompressor cannot be stopped half-way.
_ZSTD_INPUT = 2**10
_LARGEST_WINDOW = 2**27
_LZMA_MEMORY = 2**28
_MAGIC_BYTES = 8


class _Stream:
    """One compressed stream; `rest` is input that was given and not used.

    `step` bytes are unpacked at a time; `limits` follow them and bound what comes out, where the library can do that.
    """

    def __init__(self, decompressor: Any, step: int = _INPUT, limits: tuple[int, ...] = (_OUTPUT,)) -> None:
        self._decompressor, self._step, self._limits = decompressor, step, limits
        self.eof, self.rest = False, b""

    def unpack(self, data: bytes) -> bytes:
        """What `data`, which follows the rest, unpacks to, or the beginning of that."""
        data = self.rest + data
        out: bytes = self._decompressor.decompress(data[: self._step], *self._limits)
        self.eof = self._decompressor.eof
        # Those of bzip2 and xz keep themselves what they have not used yet.
        unused = self._decompressor.unused_data if self.eof else getattr(self._decompressor, "unconsumed_tail", b"")
        self.rest = unused + data[self._step :]
        return out


def _zstd() -> _Stream:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
    return _Stream(decompressor, _ZSTD_INPUT, ())


_FORMATS: tuple[tuple[re.Pattern[bytes], Callable[[], _Stream]], ...] = (
    (re.compile(rb"\x1f\x8b"), lambda: _Stream(zlib.decompressobj(zlib.MAX_WBITS | 16))),
    (re.compile(rb"BZh"), lambda: _Stream(bz2.BZ2Decompressor())),
    (re.compile(rb"\xfd7zXZ\x00"), lambda: _Stream(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY))),
    # The second kind are frames that hold no data but what a program notes for itself.
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _zstd),
)


def decompressed(file: BinaryIO) -> io.BufferedReader:
    """What `file` unpacks to; reading it raises `ExtractionError` where the file is damaged or ends too early."""
    return io.BufferedReader(_Plain(file), _OUTPUT)


class _Plain(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._stream: _Stream | None = None
        self._waiting = b""
        self._out = memoryview(b"")
        self._streams = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._out:
            self._out = memoryview(self._next())
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def _next(self) -> bytes:
        """Some bytes more, none at the end of the file."""
        while True:
            if self._stream is None and not self._begin():
                return b""
            assert self._stream is not None
            data = self._waiting or (b"" if self._stream.rest else self._file.read(_INPUT))
            self._waiting = b""
            try:
                out = self._stream.unpack(data)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, _zstd_error()) as error:
                raise _failure(error) from None
            if self._stream.eof:
                self._waiting, self._stream = self._stream.rest, None
            elif not out and not data and not self._stream.rest:
                raise ExtractionError("damaged", "it ends too early")
            if out:
                return out

    def _begin(self) -> bool:
        """Turns to the next stream in the file; False when there is none."""
        while len(self._waiting) < _MAGIC_BYTES and (more := self._file.read(_INPUT)):
            # Tapes and some programs fill files up with zeros.
            self._waiting = (self._waiting + more) if self._streams == 0 else (self._waiting + more).lstrip(b"\0")
        if self._streams:
            self._waiting = self._waiting.lstrip(b"\0")
        if not self._waiting and self._streams:
            return False
        for magic, make in _FORMATS:
            if magic.match(self._waiting):
                self._stream = make()
                self._streams += 1
                return True
        raise ExtractionError("damaged", "what follows its compressed data is not compressed")


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


def _failure(error: Exception) -> Exception:
    """The error to raise: reading from disk may fail as well, which is not the fault of the data."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    text = str(error)
    if "too much memory" in text or "Memory usage limit" in text:
        return ExtractionError("unsupported", "unpacking it needs more memory than is allowed")
    return ExtractionError("damaged", f"it cannot be unpacked: {text}")
