"""Bytes to text: the encoding is found, or the bytes are refused; newlines and indentation stay as they are.

In this order: a byte order mark; UTF-16 by the places of its NULs; the coding cookie of Python source (PEP 263); UTF-8;
detection among the encodings that text on disk is likely to have. Text is never decoded with replacement characters.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from sheepop.data.extract.interface import ExtractionError

# UTF-32 comes first: its little-endian mark begins with the mark of UTF-16.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf_32_le"),
    (codecs.BOM_UTF32_BE, "utf_32_be"),
    (codecs.BOM_UTF8, "utf_8"),
    (codecs.BOM_UTF16_LE, "utf_16_le"),
    (codecs.BOM_UTF16_BE, "utf_16_be"),
)
# UTF-16 without a mark. In the scripts of alphabets the high bytes are below 0x22, which includes punctuation; in ASCII
# that is mistaken for it hardly any are. Ideographs and Hangul have other high bytes, and low bytes of all values.
_ALPHABETS = bytes(range(0x22))
_IDEOGRAPHS = bytes((*range(0x22), 0x30, *range(0x4E, 0xA0), *range(0xAC, 0xD8), 0xFF))
_HIGH_VALUES = bytes(range(0x80, 0x100))
_LEAST_UNITS = 8
_MOST_OTHER_UNITS = 0.05
_LEAST_HIGH_VALUES = 0.25
PYTHON_SUFFIXES = (".py", ".pyw", ".pyi")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK_OR_COMMENT = re.compile(rb"^[ \t\f]*(?:#|$)")

# Codecs that a cookie may name but that are escapes or host names, not encodings of text.
_NOT_FOR_TEXT = frozenset({"unicode-escape", "raw-unicode-escape", "utf-7", "idna", "punycode", "undefined"})

# Candidates are tried group by group, each with the share of implausible text that it may have; the next group only
# when nothing of the first fits. Cp1250 must not compete with cp1252, because Western text read as cp1250 looks
# plausible too, while Polish or Czech read as cp1252 is refused outright.
_ISOLATED_ACCENTS = (
    (("cp1252",), 1.0),
    (("cp1250", "cp1254", "cp1257", "iso8859_2", "mac_roman", "cp437"), 0.2),
)
_WHOLE_WORDS = (
    (("cp932", "euc_jp", "gb18030", "big5", "cp949", "cp1251", "koi8_r", "cp1253", "cp1252"), 0.2),
    (("cp1250", "cp1254", "cp1255", "cp1256", "cp1257", "iso8859_2", "mac_roman", "cp437"), 0.2),
)
_HIGH_BYTE = re.compile(rb"[\x80-\xff]")
_ISOLATED_HIGH_BYTE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
# Detection decodes what it is given once per candidate; a sample of this size decides as well as the whole.
DETECTION_BYTES = 2**18
_BLOCK = 2**20

# Control characters that have no place in text: all of C0 but \a \b \t \n \v \f \r and escape.
CONTROLS = bytes(c for c in range(32) if c not in (7, 8, 9, 10, 11, 12, 13, 27)) + b"\x7f"
MAX_CONTROL_SHARE = {"utf_8": 0.1, "detected": 0.002}


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text without its byte order mark, and the encoding it had on disk."""

    text: str
    encoding: str


class UndecodableError(ExtractionError):
    """The bytes are not text; `reason` is ``binary`` or ``undecodable``, `detail` says why."""


def decode(data: bytes, name: str = "") -> Decoded:
    """The text in `data`; the file's `name` only tells whether a Python coding cookie counts.

    Raises `UndecodableError` for binary content and for text in no encoding that is known here.
    """
    # Most text is UTF-8 without any mark, and looked at only once.
    is_marked = data.startswith(tuple(mark for mark, _ in BYTE_ORDER_MARKS)) or _cookie_in(data, name) is not None
    if not is_marked and b"\0" not in data and (text := _strictly(data, "utf_8")) is not None:
        _refuse_controls(_num_controls(data), len(data), MAX_CONTROL_SHARE["utf_8"])
        return Decoded(text, "utf_8")
    encoding, mark_length = find_encoding(io.BytesIO(data), name)
    return Decoded(data[mark_length:].decode(encoding), encoding)


def find_encoding(file: BinaryIO, name: str = "") -> tuple[str, int]:
    """The encoding of a file of any size and the length of its mark, for the text that `decode` gives.

    No more than a block is in memory. Raises `UndecodableError`.
    """
    head = file.read(DETECTION_BYTES)
    wide = wide_encoding(head)
    if wide is None and head.startswith(codecs.BOM_UTF8):
        wide = "utf_8", len(codecs.BOM_UTF8)
    if wide and _fits(file, *wide):
        return wide
    controls, size = _survey(file)
    cookie = _cookie_in(head, name)
    if cookie is not None and _fits(file, cookie):
        return cookie, 0
    if _fits(file, "utf_8"):
        _refuse_controls(controls, size, MAX_CONTROL_SHARE["utf_8"])
        return "utf_8", 0
    _refuse_controls(controls, size, MAX_CONTROL_SHARE["detected"])
    for encoding in likely_encodings(_sample(file)):
        if _fits(file, encoding):
            return encoding, 0
    raise UndecodableError("undecodable", "its bytes do not fit any of the usual text encodings")


def _survey(file: BinaryIO) -> tuple[int, int]:
    """How many control characters the file holds, and its size; raises `UndecodableError` at a NUL."""
    file.seek(0)
    controls = size = 0
    while block := file.read(_BLOCK):
        position = block.find(b"\0")
        if position >= 0:
            raise UndecodableError("binary", f"it contains a NUL byte at offset {size + position:,}")
        controls += _num_controls(block)
        size += len(block)
    return controls, size


def _num_controls(data: bytes) -> int:
    return len(data) - len(data.translate(None, CONTROLS))


def _refuse_controls(controls: int, size: int, limit: float) -> None:
    if controls > limit * size:
        raise UndecodableError("binary", f"{controls / size:.1%} of its bytes are control characters")


def _fits(file: BinaryIO, encoding: str, begin: int = 0) -> bool:
    """Whether the whole file from `begin` is valid in `encoding`, without NULs and halves of surrogate pairs."""
    try:
        return all(b"\0" not in block for block in utf8_blocks(file, encoding, begin))
    except (LookupError, ValueError):
        return False


def utf8_blocks(file: BinaryIO, encoding: str, begin: int) -> Iterator[bytes]:
    """The text of a file from `begin` in `encoding`, block by block in UTF-8; raises ValueError where it is invalid."""
    file.seek(begin)
    decoder = codecs.getincrementaldecoder(encoding)()
    while block := file.read(_BLOCK):
        yield decoder.decode(block).encode("utf-8")
    yield decoder.decode(b"", final=True).encode("utf-8")


def _sample(file: BinaryIO) -> bytes:
    """The bytes of a small file; of another the first whole lines that are not ASCII, which tell encodings apart."""
    file.seek(0)
    lines, size, begin = [], 0, file.read(DETECTION_BYTES + 1)
    if len(begin) <= DETECTION_BYTES:
        return begin
    while size < DETECTION_BYTES and (block := file.read(_BLOCK)):
        *whole, begin = (begin + block).splitlines(keepends=True)
        # Lines longer than those of text are passed over.
        begin = begin if len(begin) <= DETECTION_BYTES else b""
        for line in whole:
            if size < DETECTION_BYTES and len(line) <= DETECTION_BYTES and not line.isascii():
                lines.append(line)
                size += len(line)
    return b"".join(lines) or begin


def unmarked_utf16(head: bytes) -> str:
    """The kind of UTF-16 that text with such a beginning is in although no mark says so, empty for other bytes."""
    head = head[: len(head) // 2 * 2]
    for encoding, low, high in (("utf_16_le", head[::2], head[1::2]), ("utf_16_be", head[1::2], head[::2])):
        if b"\0" not in high or len(high) < _LEAST_UNITS:
            continue
        high_values = len(low) - len(low.translate(None, _HIGH_VALUES))
        usual = _IDEOGRAPHS if high_values >= _LEAST_HIGH_VALUES * len(low) else _ALPHABETS
        if len(high.translate(None, usual)) <= _MOST_OTHER_UNITS * len(high) and _is_text_in(head, encoding):
            return encoding
    return ""


def _is_text_in(head: bytes, encoding: str) -> bool:
    try:
        # The end may be half of a surrogate pair.
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    odd = sum(not (character.isprintable() or character.isspace() or character == "\ufeff") for character in text)
    return odd <= MAX_CONTROL_SHARE["detected"] * len(text)


def wide_encoding(head: bytes) -> tuple[str, int] | None:
    """UTF-16 or UTF-32 as the first bytes of a file show it, and the length of its mark; None for all else."""
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark) and encoding != "utf_8":
            return encoding, len(mark)
    encoding = unmarked_utf16(head)
    return (encoding, 0) if encoding else None


def _cookie_in(data: bytes, name: str) -> str | None:
    return cookie_encoding(data) if name.lower().endswith(PYTHON_SUFFIXES) else None


def cookie_encoding(data: bytes) -> str | None:
    """PEP 263: a comment in the first two lines names the encoding; the first line must then be blank or comment.

    None without one, for UTF-8, and for what cannot be the encoding of Python source.
    """
    for line in data[:1024].splitlines()[:2]:
        match = _COOKIE.match(line)
        if match:
            return _source_encoding(match.group(1).decode("ascii"))
        if not _BLANK_OR_COMMENT.match(line):
            return None
    return None


def _source_encoding(encoding: str) -> str | None:
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError):
        return None
    # Python source is ASCII up to its cookie, so a cookie such as utf-16 cannot be true.
    if name in (*_NOT_FOR_TEXT, "utf-8") or _strictly(b"# coding", name) != "# coding":
        return None
    return name.replace("-", "_")


def likely_encodings(sample: bytes) -> Iterator[str]:
    """The encodings that text which is not UTF-8 may have, the most likely first, by whole lines of it."""
    from charset_normalizer import from_bytes

    for candidates, threshold in _ISOLATED_ACCENTS if _is_mostly_latin(sample) else _WHOLE_WORDS:
        for match in from_bytes(sample, cp_isolation=list(candidates), threshold=threshold, enable_fallback=False):
            yield match.encoding


def _is_mostly_latin(data: bytes) -> bool:
    """Whether most bytes beyond ASCII stand alone among ASCII, as accents do and other scripts do not."""
    return 2 * len(_ISOLATED_HIGH_BYTE.findall(data)) > len(_HIGH_BYTE.findall(data))


def _strictly(data: bytes, encoding: str) -> str | None:
    """The decoded text, or None when `data` is not valid in `encoding` or holds lone surrogates."""
    try:
        text = data.decode(encoding)
        if encoding != "utf_8":
            text.encode("utf-8")
    except (LookupError, ValueError):
        return None
    return text
