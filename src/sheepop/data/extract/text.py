"""Plain text, markup that is read as it stands, and source code: decoded, otherwise untouched."""

from __future__ import annotations

from collections.abc import Iterator

from sheepop.data.decoding import decode, find_encoding, utf8_blocks
from sheepop.data.extract.cutting import cut_point
from sheepop.data.extract.interface import Content, Context, Extracted, Refused


def extract_text(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """The text of `content`; when it is longer than a document may be, its pieces, which end at line ends.

    The encoding is in the metadata. A run of letters without a place to cut within the limit is refused by itself.
    Raises `ExtractionError` with reason ``binary`` or ``undecodable``.
    """
    limit = context.config.max_document_bytes
    if content.size <= limit:
        with content.open() as file:
            data = file.read(limit + 1)
        if len(data) <= limit:
            decoded = decode(data, content.name)
            yield Extracted(decoded.text, metadata={"encoding": decoded.encoding})
            return
    number = 0
    with content.open() as file:
        encoding, mark_length = find_encoding(file, content.name)
        for piece in _pieces(utf8_blocks(file, encoding, mark_length), limit):
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
