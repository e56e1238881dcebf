"""Where a text that is too long for one document is cut, so that its pieces put together are the text again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sheepop.data.extract.interface import Extracted


def cut_point(data: bytes | bytearray, limit: int) -> int:
    """How many of more than `limit` bytes of UTF-8 the first piece takes.

    It ends after a blank line in the second half of what is allowed, else after a line end, else after a blank; 0
    when there is none of these. A CR LF is never torn apart.
    """
    half = limit // 2
    blank_line = max(_after(data, b"\n\n", half, limit), _after(data, b"\n\r\n", half, limit))
    return blank_line or _line_end(data, limit) or max(_after(data, b" ", 0, limit), _after(data, b"\t", 0, limit))


def pieces_of(document: Extracted, limit: int) -> Iterator[Extracted]:
    """The document itself when it takes at most `limit` bytes of UTF-8, else its pieces with their places and marks.

    Raises UnicodeEncodeError when the text holds half of a surrogate pair.
    """
    text = document.text
    data = b"" if text.isascii() and len(text) <= limit else text.encode("utf-8")
    if len(data) <= limit:
        yield document
        return
    number = begin = offset = 0
    while begin < len(data):
        rest = memoryview(data)[begin : begin + limit + 1]
        end = begin + (_piece_length(bytes(rest), limit) if len(rest) > limit else len(rest))
        piece = data[begin:end].decode("utf-8")
        number += 1
        place = f"{document.place}, piece {number}" if document.place else f"piece {number}"
        marks = _marks_between(document.marks, offset, offset + len(piece))
        yield replace(document, text=piece, place=place, marks=marks)
        begin, offset = end, offset + len(piece)


def _piece_length(data: bytes, limit: int) -> int:
    length = cut_point(data, limit)
    if length:
        return length
    # Nowhere to cut: not inside a character at least.
    while data[limit] & 0xC0 == 0x80:
        limit -= 1
    return limit


def _after(data: bytes | bytearray, what: bytes, begin: int, end: int) -> int:
    position = data.rfind(what, begin, end)
    return 0 if position < 0 else position + len(what)


def _line_end(data: bytes | bytearray, limit: int) -> int:
    end = _after(data, b"\n", 0, limit)
    if end:
        return end
    end = _after(data, b"\r", 0, limit)
    return end if data[end : end + 1] != b"\n" else _after(data, b"\r", 0, end - 1)


def _marks_between(marks: tuple[tuple[int, str], ...], begin: int, end: int) -> tuple[tuple[int, str], ...]:
    """The marks of a piece; one that stands before it holds on until the next."""
    inside = tuple((offset - begin, name) for offset, name in marks if begin <= offset < end)
    before = [name for offset, name in marks if offset < begin]
    return ((0, before[-1]), *inside) if before and not (inside and inside[0][0] == 0) else inside
