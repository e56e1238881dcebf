"""Reads the lines of a text file of any length and encoding, with one line in memory at a time."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import BinaryIO, cast

from sheepop.data.decoding import decode, utf8_blocks, wide_encoding
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.unpacking import buffered

_BLOCK, _SKIPPED = 2**18, 2**16
_DETECTION_BYTES = 2**18
_LONGEST_DETECTED = 2**20


class Lines:
    """Iterates over the decoded lines of `content` as (number from 1, line with its line end).

    Instead of a line it yields an `ExtractionError` if the line is longer than `max_bytes` (it is then never in memory
    as a whole), or if it cannot be decoded. Lines are UTF-8; if most lines that are not ASCII do not fit UTF-8, lines
    that do not fit it are decoded with the detected `encoding`. Raises `ExtractionError` if none is detected.
    """

    def __init__(self, content: Content, max_bytes: int) -> None:
        self._content, self._max_bytes = content, max_bytes
        self.encoding = "utf_8"
        self._is_settled = False

    def __iter__(self) -> Iterator[tuple[int, str | ExtractionError]]:
        with open_utf8(self._content) as file:
            for number, line in enumerate(byte_lines(file, self._max_bytes), 1):
                if line is None:
                    yield number, ExtractionError("oversized", f"the line is over {self._max_bytes:,} bytes")
                    continue
                try:
                    yield number, line.decode(self.encoding)
                except UnicodeDecodeError:
                    yield number, self._decoded(line)

    def _decoded(self, line: bytes) -> str | ExtractionError:
        if not self._is_settled:
            self.encoding, self._is_settled = _encoding_of_lines(self._content), True
        try:
            return line.decode(self.encoding)
        except UnicodeDecodeError as error:
            return ExtractionError("undecodable", f"byte {error.start + 1} of the line does not fit {error.encoding}")


def _encoding_of_lines(content: Content) -> str:
    """Returns UTF-8 if at least half of the non-ASCII lines fit it, else the encoding detected for the others."""
    fitting, size = 0, 0
    others: list[bytes] = []
    with open_utf8(content) as file:
        for line in byte_lines(file, _LONGEST_DETECTED):
            if line is None or line.isascii():
                continue
            try:
                line.decode("utf-8")
                fitting += 1
            except UnicodeDecodeError:
                others.append(line)
                size += len(line)
            if size >= _DETECTION_BYTES:
                break
    return "utf_8" if fitting >= len(others) else decode(b"".join(others)).encoding


def byte_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """Yields the lines of a file with their line ends, and None for a line over `max_bytes`, which is skipped."""
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield line
            continue
        yield None
        while (rest := file.readline(_SKIPPED)) and not rest.endswith(b"\n"):
            pass


def open_utf8(content: Content) -> io.BufferedReader:
    """Opens the bytes of `content` without a byte order mark; turns UTF-16 and UTF-32 into UTF-8, lone CR into LF.

    Reading raises `ExtractionError` if UTF-16 or UTF-32 is invalid.
    """
    file = content.open()
    head = file.read(_BLOCK)
    if wide := wide_encoding(head):
        return buffered(file, filter(None, _recoded(file, *wide)))
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
    if b"\r" in head and b"\n" not in head:
        return buffered(file, iter(lambda: file.read(_BLOCK).replace(b"\r", b"\n"), b""))
    # With the default buffer of 8 KiB, reading lines takes five times as long.
    return io.BufferedReader(cast(io.RawIOBase, file), _BLOCK)


def _recoded(file: BinaryIO, encoding: str, begin: int) -> Iterator[bytes]:
    try:
        yield from utf8_blocks(file, encoding, begin)
    except UnicodeError as error:
        raise ExtractionError("undecodable", f"it is not valid {encoding}: {error}") from None
