"""Decodes bytes: finds the encoding or refuses the bytes; newlines and indentation stay as they are.

It tries, in order: a byte order mark; UTF-16 by the positions of NULs; the coding cookie of Python source (PEP 263);
UTF-8; detection among the encodings that are common on disk. It never inserts replacement characters.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from sheepop.data.extract.interface import ExtractionError

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

# Groups of candidates, each with the share of implausible text that it tolerates; the second group is tried only if
# nothing in the first fits. Cp1250 must not compete with cp1252, because Western text decoded as cp1250 looks plausible
# too, while Polish or Czech decoded as cp1252 is refused outright.
_ISOLATED_ACCENTS = ((("cp1252",), 1.0), (("cp1250", "cp1254", "cp1257", "iso8859_2", "mac_roman", "cp437"), 0.2))
_WHOLE_WORDS = (
    (("cp932", "euc_jp", "gb18030", "big5", "cp949", "cp1251", "koi8_r", "cp1253", "cp1252"), 0.2),
    (("cp1250", "cp1254", "cp1255", "cp1256", "cp1257", "iso8859_2", "mac_roman", "cp437"), 0.2),
)
_HIGH_BYTE = re.compile(rb"[\x80-\xff]")
_ISOLATED_HIGH_BYTE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
# Detection decodes its input once per candidate; a sample of this size decides as well as the whole.
_DETECTION_BYTES = 2**18
_BLOCK = 2**20

# Control characters that do not belong in text: DEL and all of C0 except \a \b \t \n \v \f \r and escape.
CONTROLS = bytes(c for c in range(32) if c not in (7, 8, 9, 10, 11, 12, 13, 27)) + b"\x7f"
_MOST_CONTROLS_IN_UTF8, _MOST_CONTROLS = 0.1, 0.002


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text without its byte order mark, and its encoding on disk."""

    text: str
    encoding: str


def decode(data: bytes, name: str = "") -> Decoded:
    """Decodes `data`, by its cookie if `name` is of Python source; raises `ExtractionError` (binary, undecodable)."""
    # Most text is UTF-8 without a mark; this path reads it only once.
    if not data.startswith(_MARKS) and _cookie(data, name) is None and b"\0" not in data:
        with suppress(UnicodeDecodeError):
            text = data.decode("utf-8")
            _refuse_controls(_num_controls(data), len(data), _MOST_CONTROLS_IN_UTF8)
            return Decoded(text, "utf_8")
    encoding, mark_length = find_encoding(io.BytesIO(data), name)
    return Decoded(data[mark_length:].decode(encoding), encoding)


def find_encoding(file: BinaryIO, name: str = "") -> tuple[str, int]:
    """The encoding that `decode` would use, and the length of its mark; reads block by block, raises as `decode`."""
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
    for encoding in _likely_encodings(_sample(file)):
        if _fits(file, encoding):
            return encoding, 0
    raise ExtractionError("undecodable", "its bytes do not fit any of the usual text encodings")


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


def _likely_encodings(sample: bytes) -> Iterator[str]:
    """The encodings that text other than UTF-8 may have, the most likely first, judged by a sample of whole lines."""
    from charset_normalizer import from_bytes

    # Accented letters are isolated among ASCII; letters of other scripts are not.
    is_latin = 2 * len(_ISOLATED_HIGH_BYTE.findall(sample)) > len(_HIGH_BYTE.findall(sample))
    for candidates, threshold in _ISOLATED_ACCENTS if is_latin else _WHOLE_WORDS:
        for match in from_bytes(sample, cp_isolation=list(candidates), threshold=threshold, enable_fallback=False):
            yield match.encoding
