"""Decodes plain text, markup that stays unchanged, and source code; cuts long text, and reads files line by line."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, cast

from sheepop.data.decoding import decode, find_damage, find_encoding, left_out, utf8_blocks, wide_encoding, without
from sheepop.data.extract.interface import (
    Content,
    Context,
    Documents,
    Extracted,
    ExtractionError,
    Refused,
    Span,
    buffered,
)

_BLOCK, _SKIPPED = 2**18, 2**16
_DETECTION_BYTES = 2**18
_LONGEST_DETECTED = 2**20


def extract_text(content: Content, context: Context) -> Documents:
    """Yields the text of `content`, or pieces that end at line ends if it is longer than a document may be.

    The encoding is in the metadata. A run without white space that is over the limit is refused alone.
    Raises `ExtractionError`: ``binary`` or ``undecodable``.
    """
    limit, span = context.config.max_document_bytes, content.span
    if span is not None:
        with content.section() as section:
            text = section.read().decode("utf-8")
        yield Extracted(text, place=f"piece {span.before + 1}", metadata={"encoding": "utf_8"})
        return
    if content.size <= limit:
        with content.open() as file:
            data = file.read(limit + 1)
        if len(data) <= limit:
            damage: list[int] = []
            decoded = decode(data, content.name, damage)
            yield Extracted(decoded.text, metadata={"encoding": decoded.encoding})
            yield from left_out(damage)
            return
    number = 0
    with content.open() as file:
        if damage := find_damage(file):
            encoding, blocks = "utf_8", _without_damage(file, damage)
        else:
            encoding, mark_length = find_encoding(file, content.name)
            blocks = utf8_blocks(file, encoding, mark_length)
        for piece in _pieces(blocks, limit):
            if isinstance(piece, Refused):
                yield piece
            else:
                number += 1
                yield Extracted(piece, place=f"piece {number}", metadata={"encoding": encoding})
    yield from left_out(damage)


def _without_damage(file: BinaryIO, damage: list[int]) -> Iterator[bytes]:
    begin = 0
    file.seek(0)
    while block := file.read(_BLOCK):
        inside = [offset for offset in damage if begin <= offset < begin + len(block)]
        plain = without(block, inside, begin)
        yield plain.removeprefix(codecs.BOM_UTF8) if begin == 0 else plain
        begin += len(block)


def cut_text(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields the pieces that `extract_text` would make of a long text in UTF-8; see `Cutter`."""
    limit, found = context.config.max_document_bytes, list[Span]()
    if content.size <= limit:
        return
    with content.open() as file:
        if find_damage(file):
            return
        encoding, begin = find_encoding(file, content.name)
        file.seek(begin)
        waiting = file.read(limit + 1) if encoding == "utf_8" else b""
        while waiting:
            length = cut_point(waiting, limit) if len(waiting) > limit else len(waiting)
            if not length:  # a run without white space, which is refused with its line
                return
            found.append(Span(len(found), begin, begin + length, len(found), length))
            begin += length
            waiting = waiting[length:] + file.read(length)
    yield from found


def cut_lines(content: Content, part_bytes: int) -> Iterator[Span]:
    """Yields spans of whole lines, of about `part_bytes`; none if lines do not end with the byte LF."""
    with content.open() as file:
        head = file.read(_BLOCK)
        if not ends_lines_with_lf(head):
            return
        begin, lines, number = len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8), 0, 0
        file.seek(begin)
        while block := file.read(min(part_bytes, _BLOCK)):
            end, ends = begin + len(block), block.count(b"\n")
            while block and (end - begin < part_bytes or not block.endswith(b"\n")):
                left = part_bytes - (end - begin)
                block = file.read(min(left, _BLOCK)) if left > 0 else file.readline(_SKIPPED)
                end, ends = end + len(block), ends + block.count(b"\n")
            yield Span(number, begin, end, lines, end - begin, lines=lines)
            number, begin, lines = number + 1, end, lines + ends


def ends_lines_with_lf(head: bytes) -> bool:
    """Returns whether a file that begins so can be cut after each byte LF."""
    return not wide_encoding(head) and (b"\n" in head or b"\r" not in head)


def _pieces(blocks: Iterator[bytes], limit: int) -> Iterator[str | Refused]:
    """Yields pieces of text of at most `limit` bytes, and a refusal for each longer run without white space."""
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
    """Returns the index of the first white space, or the length if there is none."""
    return min((index for mark in b"\n\r \t" if (index := data.find(mark)) >= 0), default=len(data))


def _too_long(line: int, num_bytes: int, limit: int) -> Refused:
    detail = f"{num_bytes:,} bytes without a line end or blank, over data.extract.max_document_bytes = {limit:,}"
    return Refused(f"line {line}", "oversized", detail)


def cut_point(data: bytes | bytearray, limit: int) -> int:
    """Returns the length of the first piece of more than `limit` bytes of UTF-8.

    It ends after an empty line in the second half of the limit, else after a line end, else after a blank; 0 if there
    is none of these. CR LF is never separated.
    """

    def after(mark: bytes, begin: int = 0, end: int = limit) -> int:
        position = data.rfind(mark, begin, end)
        return 0 if position < 0 else position + len(mark)

    half = limit // 2
    # The line feed may be just after the limit.
    before_line_feed = limit - (data[limit - 1 : limit + 1] == b"\r\n")
    return (
        max(after(b"\n\n", half), after(b"\n\r\n", half))
        or after(b"\n")
        or after(b"\r", end=before_line_feed)
        or max(after(b" "), after(b"\t"))
    )


def pieces_of(document: Extracted, limit: int) -> Iterator[Extracted]:
    """Yields the document, or its pieces of at most `limit` bytes; raises UnicodeEncodeError for a half surrogate."""
    text = document.text
    data = b"" if text.isascii() and len(text) <= limit else text.encode("utf-8")
    if len(data) <= limit:
        yield document
        return
    number = begin = offset = 0
    while begin < len(data):
        rest = data[begin : begin + limit + 1]
        length = len(rest) if len(rest) <= limit else cut_point(rest, limit) or limit
        # If there was no good place to cut, at least do not cut inside a character.
        while length < len(rest) and rest[length] & 0xC0 == 0x80:
            length -= 1
        piece = rest[:length].decode("utf-8")
        number += 1
        place = f"{document.place}, piece {number}" if document.place else f"piece {number}"
        marks = _marks_between(document.marks, offset, offset + len(piece))
        yield replace(document, text=piece, place=place, marks=marks)
        begin, offset = begin + length, offset + len(piece)


def _marks_between(marks: tuple[tuple[int, str], ...], begin: int, end: int) -> tuple[tuple[int, str], ...]:
    """Returns the marks of a piece; the last mark before the piece applies from its beginning."""
    inside = tuple((offset - begin, name) for offset, name in marks if begin <= offset < end)
    before = [name for offset, name in marks if offset < begin]
    return ((0, before[-1]), *inside) if before and not (inside and inside[0][0] == 0) else inside


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
        span = self._content.span
        with open_utf8(self._content) as file:
            for number, line in enumerate(byte_lines(file, self._max_bytes), 1 + (span.lines if span else 0)):
                if line is None:
                    yield number, ExtractionError("oversized", f"the line is over {self._max_bytes:,} bytes")
                    continue
                try:
                    yield number, line.decode(self.encoding)
                except UnicodeDecodeError:
                    yield number, self._decoded(line)

    def _decoded(self, line: bytes) -> str | ExtractionError:
        if not self._is_settled:
            self.encoding, self._is_settled = _encoding_of_lines(self._content.whole()), True
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
    """Opens `content` as UTF-8 without byte order mark, lone CR as LF; reading raises `ExtractionError` if invalid."""
    if content.span is not None:
        return content.section(_BLOCK)
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
