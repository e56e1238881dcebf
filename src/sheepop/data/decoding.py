"""Decodes bytes: finds the encoding or refuses the bytes; newlines and indentation stay as they are.

It tries, in order: a byte order mark; UTF-16 by the positions of NULs; the coding cookie of Python source (PEP 263);
UTF-8; UTF-8 without a few bytes that do not fit, if the caller reports them; detection among the encodings that are
common on disk. It never inserts replacement characters.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from sheepop.data.charsets import likely_encodings
from sheepop.data.extract.interface import ExtractionError, Refused

# UTF-32 comes first: its little-endian mark begins with the mark of UTF-16.
_WIDE_MARKS = (
    (codecs.BOM_UTF32_LE, "utf_32_le"),
    (codecs.BOM_UTF32_BE, "utf_32_be"),
    (codecs.BOM_UTF16_LE, "utf_16_le"),
    (codecs.BOM_UTF16_BE, "utf_16_be"),
)
_MARKS = (codecs.BOM_UTF8, *(mark for mark, _ in _WIDE_MARKS))
# UTF-16 without a mark. In alphabetic scripts, punctuation included, the high bytes are below 0x22; in ASCII text taken
# for UTF-16 hardly any are. Ideographs and Hangul have other high bytes, and low bytes of all values.
_ALPHABETS = bytes(range(0x22))
_IDEOGRAPHS = bytes((*range(0x22), 0x30, *range(0x4E, 0xA0), *range(0xAC, 0xD8), 0xFF))
_LOW_VALUES = bytes(range(0x80))
_LEAST_UNITS = 8
_MOST_OTHER_UNITS = 0.05
_LEAST_HIGH_VALUES = 0.25
_PYTHON_SUFFIXES = (".py", ".pyw", ".pyi")
# In the first line, or in the second after a blank line or a comment.
_COOKIE = re.compile(rb"(?:[ \t\f]*(?:#[^\r\n]*)?(?:\r\n|\r|\n))??[ \t\f]*#[^\r\n]*?coding[:=][ \t]*([-\w.]+)")
# Codecs for escapes or host names, which are not text encodings; UTF-8 is tried anyway.
_NOT_FROM_COOKIES = ("unicode-escape", "raw-unicode-escape", "utf-7", "idna", "punycode", "undefined", "utf-8")

# Detection decodes its input once per candidate; a sample of this size decides as well as the whole.
_DETECTION_BYTES = 2**18
_BLOCK = 2**20
# Damage is rare among characters that fit. A cut file may end with part of a character.
_DAMAGE = re.compile("[\udc80-\udcff\0]+")
_UNFINISHED = re.compile(rb"[\xc2-\xf4]?[\x80-\xbf]{0,2}\Z")
_LEAD_BYTES = bytes(range(0xC2, 0xF5))
_MOST_DAMAGE, BYTES_A_NUL, _FITTING = 1000, 1000, 10

# Control characters that do not belong in text: DEL and all of C0 except \a \b \t \n \v \f \r and escape.
CONTROLS = bytes(c for c in range(32) if c not in (7, 8, 9, 10, 11, 12, 13, 27)) + b"\x7f"
_MOST_CONTROLS_IN_UTF8, _MOST_CONTROLS = 0.1, 0.002


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text without its byte order mark, and its encoding on disk."""

    text: str
    encoding: str


def decode(data: bytes, name: str = "", damage: list[int] | None = None) -> Decoded:
    """Decodes `data`, by its cookie if `name` is of Python source; raises `ExtractionError` (binary, undecodable).

    With a list `damage`, a few bytes that do not fit otherwise good UTF-8 are left out, and their offsets put there.
    """
    # Most text is UTF-8 without a mark; this path reads it only once.
    if not data.startswith(_MARKS) and _cookie(data, name) is None and b"\0" not in data:
        with suppress(UnicodeDecodeError):
            text = data.decode("utf-8")
            _refuse_controls(_num_controls(data), len(data), _MOST_CONTROLS_IN_UTF8)
            return Decoded(text, "utf_8")
    if damage is not None and (found := find_damage(io.BytesIO(data))):
        damage += found
        data = without(data, found)
    encoding, mark_length = find_encoding(io.BytesIO(data), name)
    return Decoded(data[mark_length:].decode(encoding), encoding)


def find_encoding(file: BinaryIO, name: str = "") -> tuple[str, int]:
    """The encoding that `decode` would use, and the length of its mark; reads block by block, raises as `decode`."""
    file.seek(0)
    head = file.read(_DETECTION_BYTES)
    marked = ("utf_8", len(codecs.BOM_UTF8)) if head.startswith(codecs.BOM_UTF8) else wide_encoding(head)
    if marked and _fits(file, *marked):
        return marked
    controls = size = 0
    file.seek(0)
    while block := file.read(_BLOCK):
        if (position := block.find(b"\0")) >= 0:
            raise ExtractionError("binary", f"it contains a NUL byte at offset {size + position:,}")
        controls += _num_controls(block)
        size += len(block)
    if (cookie := _cookie(head, name)) and _fits(file, cookie):
        return cookie, 0
    if _fits(file, "utf_8"):
        _refuse_controls(controls, size, _MOST_CONTROLS_IN_UTF8)
        return "utf_8", 0
    _refuse_controls(controls, size, _MOST_CONTROLS)
    for encoding in likely_encodings(_sample(file)):
        if _fits(file, encoding):
            return encoding, 0
    raise ExtractionError("undecodable", "its bytes do not fit any of the usual text encodings")


def find_damage(file: BinaryIO) -> list[int]:
    """The offsets of NULs and of bytes that are not UTF-8, if they are few in a text that is UTF-8; none otherwise."""
    found: list[int] = []
    size = begin = wide = 0
    rest = b""
    file.seek(0)
    while block := file.read(_BLOCK):
        data, is_last = rest + block, len(block) < _BLOCK
        # A character at the end of the block is judged with the next one.
        end = len(data) if is_last else len(data) - len(_UNFINISHED.search(data, max(0, len(data) - 3))[0])  # type: ignore[index]
        text = data[:end].decode("utf-8", "surrogateescape")
        wide += end - len(data[:end].translate(None, _LEAD_BYTES))
        at = before = 0
        for match in _DAMAGE.finditer(text):
            at += len(text[before : match.start()].encode("utf-8"))
            found += range(begin + at, begin + at + len(match[0]))
            at, before = at + len(match[0]), match.end()
            if len(found) > _MOST_DAMAGE:
                return []
        begin, rest, size = begin + end, data[end:], size + len(block)
    bad = sum(len(file.read(1).strip(b"\0")) for offset in found if not file.seek(offset) < 0)
    is_text = len(found) - bad <= size // BYTES_A_NUL and (not bad or wide > _FITTING * bad)
    return found if is_text else []


def without(data: bytes, offsets: list[int], begin: int = 0) -> bytes:
    """The data, which begin at `begin` of the file, without the bytes at these ascending offsets of the file."""
    edges = [begin - 1, *offsets, begin + len(data)]
    return b"".join(data[before + 1 - begin : after - begin] for before, after in pairwise(edges))


def left_out(damage: list[int]) -> Iterator[Refused]:
    """One refusal for each run of bytes that `decode` left out."""
    runs: list[list[int]] = []
    for offset in damage:
        if runs and runs[-1][-1] == offset - 1:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    for run in runs:
        place = f"byte {run[0]:,}" if len(run) == 1 else f"bytes {run[0]:,} to {run[-1]:,}"
        yield Refused(place, "undecodable", "it is a NUL or does not fit UTF-8, and was left out; the rest was read")


def _num_controls(data: bytes) -> int:
    return len(data) - len(data.translate(None, CONTROLS))


def _refuse_controls(controls: int, size: int, limit: float) -> None:
    if controls > limit * size:
        raise ExtractionError("binary", f"{controls / size:.1%} of its bytes are control characters")


def _fits(file: BinaryIO, encoding: str, begin: int = 0) -> bool:
    """Whether the whole file from `begin` is valid in `encoding`, without NULs or lone surrogates."""
    try:
        return all(b"\0" not in block for block in utf8_blocks(file, encoding, begin))
    except (LookupError, ValueError):
        return False


def utf8_blocks(file: BinaryIO, encoding: str, begin: int) -> Iterator[bytes]:
    """Yields a file from `begin`, read in `encoding`, as blocks of UTF-8; raises ValueError if it is invalid."""
    file.seek(begin)
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := file.read(_BLOCK):
        yield decoder.decode(block).encode("utf-8")
    yield decoder.decode(b"", final=True).encode("utf-8")


def _sample(file: BinaryIO) -> bytes:
    """All bytes of a small file; of a large one the first whole non-ASCII lines, which tell encodings apart."""
    file.seek(0)
    lines, size, begin = [], 0, file.read(_DETECTION_BYTES + 1)
    if len(begin) <= _DETECTION_BYTES:
        return begin
    while size < _DETECTION_BYTES and (block := file.read(_BLOCK)):
        *whole, begin = (begin + block).splitlines(keepends=True)
        # A line that is too long for text is skipped.
        begin = begin if len(begin) <= _DETECTION_BYTES else b""
        for line in whole:
            if size < _DETECTION_BYTES and len(line) <= _DETECTION_BYTES and not line.isascii():
                lines.append(line)
                size += len(line)
    return b"".join(lines) or begin


def wide_encoding(head: bytes) -> tuple[str, int] | None:
    """UTF-16 or UTF-32 if the first bytes of a file show it, and the length of its mark; None otherwise."""
    for mark, encoding in _WIDE_MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    head = head[: len(head) // 2 * 2] if b"\0" in head else b""
    for encoding, low, high in (("utf_16_le", head[::2], head[1::2]), ("utf_16_be", head[1::2], head[::2])):
        if b"\0" in high and len(high) >= _LEAST_UNITS and _is_utf16(head, encoding, low, high):
            return encoding, 0
    return None


def _is_utf16(head: bytes, encoding: str, low: bytes, high: bytes) -> bool:
    high_values = len(low.translate(None, _LOW_VALUES))
    usual = _IDEOGRAPHS if high_values >= _LEAST_HIGH_VALUES * len(low) else _ALPHABETS
    if len(high.translate(None, usual)) > _MOST_OTHER_UNITS * len(high):
        return False
    try:
        # `head` may end in half a surrogate pair.
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    odd = sum(not (character.isprintable() or character.isspace() or character == "\ufeff") for character in text)
    return odd <= _MOST_CONTROLS * len(text)


def _cookie(data: bytes, name: str) -> str | None:
    """The encoding named by a comment before any code (PEP 263); None for UTF-8 and for one that Python cannot have."""
    match = _COOKIE.match(data[:1024]) if name.lower().endswith(_PYTHON_SUFFIXES) else None
    if match is None:
        return None
    try:
        encoding = codecs.lookup(match[1].decode("ascii")).name
        # Python source is ASCII up to its cookie, so a cookie like utf-16 cannot be true.
        is_true = encoding not in _NOT_FROM_COOKIES and b"# coding".decode(encoding) == "# coding"
    except (LookupError, ValueError):
        return None
    return encoding.replace("-", "_") if is_true else None
