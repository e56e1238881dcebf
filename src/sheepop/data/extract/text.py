"""Plain text, markup that is read as it stands, and source code: decoded, otherwise untouched."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from sheepop.data.decoding import (
    BYTE_ORDER_MARKS,
    CONTROLS,
    DETECTION_BYTES,
    MAX_CONTROL_SHARE,
    PYTHON_SUFFIXES,
    UndecodableError,
    cookie_encoding,
    decode,
    likely_encodings,
    unmarked_utf16,
)
from sheepop.data.extract.cutting import cut_point
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused

_BLOCK = 2**20
_COOKIE_BYTES = 2**10


def extract_text(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The text of `content`; when it is longer than a document may be, its pieces, which end at line ends.

    The encoding is in the metadata. A run of letters without a place to cut within the limit is refused by itself.
    Raises `ExtractionError` with reason ``binary`` or ``undecodable``.
    """
    limit = context.config.max_document_bytes
    try:
        if content.size <= limit:
            with content.open() as file:
                data = file.read(limit + 1)
            if len(data) <= limit:
                decoded = decode(data, content.name)
                yield Extracted(decoded.text, metadata={"encoding": decoded.encoding})
                return
        with content.open() as file:
            yield from _streamed(file, content.name, limit)
    except UndecodableError as error:
        raise ExtractionError(error.reason, error.detail) from None


def _streamed(file: BinaryIO, name: str, limit: int) -> Iterator[Extracted | Refused]:
    encoding, mark_length = _encoding(file, name)
    number = 0
    for piece in _pieces(_as_utf8(file, encoding, mark_length), limit):
        if isinstance(piece, Refused):
            yield piece
        else:
            number += 1
            yield Extracted(piece, place=f"piece {number}", metadata={"encoding": encoding})


def _pieces(blocks: Iterator[bytes], limit: int) -> Iterator[str | Refused]:
    """Text of at most `limit` bytes at a time; a longer run without white space gives the reason it is left out."""
    waiting = bytearray()
    lines, left_out = 1, 0
    for block in blocks:
        waiting += block
        while len(waiting) > limit:
            end = 0 if left_out else cut_point(waiting, limit)
            if end:
                lines += waiting.count(b"\n", 0, end)
                yield waiting[:end].decode("utf-8")
            else:
                end = _run_end(waiting)
                left_out += end
            complete = not left_out or end < len(waiting)
            del waiting[:end]
            if left_out and complete:
                yield _too_long(lines, left_out, limit)
                left_out = 0
    if left_out:
        end = _run_end(waiting)
        yield _too_long(lines, left_out + end, limit)
        del waiting[:end]
    if waiting:
        yield waiting.decode("utf-8")


def _run_end(data: bytearray) -> int:
    """Where the first white space stands, the length when there is none."""
    return min((place for mark in b"\n\r \t" if (place := data.find(mark)) >= 0), default=len(data))


def _too_long(line: int, num_bytes: int, limit: int) -> Refused:
    detail = f"{num_bytes:,} bytes without a line end or blank, over data.extract.max_document_bytes = {limit:,}"
    return Refused(f"line {line}", "oversized", detail)


def _encoding(file: BinaryIO, name: str) -> tuple[str, int]:
    """The encoding of a file that is not held in memory, found as `decode` does, and the length of its mark."""
    head = file.read(_COOKIE_BYTES)
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark) and _fits(file, encoding, len(mark)):
            return encoding, len(mark)
    if (wide := unmarked_utf16(head)) and _fits(file, wide, 0):
        return wide, 0
    controls, size = _survey(file)
    cookie = cookie_encoding(head) if name.lower().endswith(PYTHON_SUFFIXES) else None
    if cookie is not None and _fits(file, cookie, 0):
        return cookie, 0
    if _fits(file, "utf_8", 0):
        _refuse_controls(controls, size, MAX_CONTROL_SHARE["utf_8"])
        return "utf_8", 0
    _refuse_controls(controls, size, MAX_CONTROL_SHARE["detected"])
    for encoding in likely_encodings(_sample(file)):
        if _fits(file, encoding, 0):
            return encoding, 0
    raise UndecodableError("undecodable", "its bytes do not fit any of the usual text encodings")


def _refuse_controls(controls: int, size: int, limit: float) -> None:
    if controls > limit * size:
        raise UndecodableError("binary", f"{controls / size:.1%} of its bytes are control characters")


def _survey(file: BinaryIO) -> tuple[int, int]:
    """How many control characters the file holds, and its size; raises `UndecodableError` at a NUL."""
    file.seek(0)
    controls = size = 0
    while block := file.read(_BLOCK):
        position = block.find(b"\0")
        if position >= 0:
            raise UndecodableError("binary", f"it contains a NUL byte at offset {size + position:,}")
        controls += len(block) - len(block.translate(None, CONTROLS))
        size += len(block)
    return controls, size


def _sample(file: BinaryIO) -> bytes:
    """The first whole lines that are not ASCII, as far as lines are of a length that text has."""
    file.seek(0)
    lines, size, begin = [], 0, b""
    while size < DETECTION_BYTES and (block := file.read(_BLOCK)):
        *whole, begin = (begin + block).splitlines(keepends=True)
        begin = begin if len(begin) <= DETECTION_BYTES else b""
        for line in whole:
            if size < DETECTION_BYTES and len(line) <= DETECTION_BYTES and not line.isascii():
                lines.append(line)
                size += len(line)
    return b"".join(lines) or begin


def _fits(file: BinaryIO, encoding: str, begin: int) -> bool:
    """Whether the whole file from `begin` is valid in `encoding`, without NULs and halves of surrogate pairs."""
    try:
        return all(b"\0" not in block for block in _as_utf8(file, encoding, begin))
    except (LookupError, ValueError):
        return False


def _as_utf8(file: BinaryIO, encoding: str, begin: int) -> Iterator[bytes]:
    file.seek(begin)
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := file.read(_BLOCK):
        yield decoder.decode(block).encode("utf-8")
    yield decoder.decode(b"", final=True).encode("utf-8")
