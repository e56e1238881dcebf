"""Signatures: the bytes by which a file of a binary format can be told, whatever its name says."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable

_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]{1,7})[ \0]*\Z")
# The second is ARC, its predecessor.
_WARC = re.compile(rb"WARC/\d+\.\d+\r?\n|filedesc://\S{1,200} [\d.]+ \d{14} text/plain ")
# The lines of a header, each with the lines that continue it, and the names of fields that programs add to a message.
_HEADER = re.compile(r"(?:[!-9;-~]+:[^\n]*+\n(?:[ \t][^\n]*+\n)*+)++")
_FIELD = re.compile(r"^([!-9;-~]+):", re.MULTILINE)
_MAIL_FIELDS = frozenset({"date", "message-id", "mime-version", "received", "return-path", "delivered-to"})
_MAILBOX = re.compile(r"From \S+ +\w{3} \w{3} +\d{1,2} \d\d:\d\d:\d\d .*\d{4}\s*$")
_PDF_WITHIN = 1024
# The sizes of the header after the file's own: OS/2 1 and 2, Windows 3 to 5.
_BMP_HEADERS = frozenset({12, 16, 40, 52, 56, 64, 108, 124})
_PYTHON_BYTECODE = re.compile(rb"[\x00-\xff][\x0b-\x10]\r\n[\x00-\x07]\0\0\0", re.DOTALL)

# Offset, bytes, type.
_SIGNATURES = (
    (0, b"PK\x03\x04", "zip"),
    (0, b"PK\x05\x06", "zip"),
    (0, b"PK\x07\x08PK\x03\x04", "zip"),
    (0, b"\x1f\x8b\x08", "gzip"),
    (0, b"\xfd7zXZ\x00", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"SQLite format 3\x00", "sqlite"),
    (8, b"DUCK", "duckdb"),
    (0, b"PAR1", "parquet"),
    (0, b"ARROW1\x00\x00", "arrow"),
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"II*\x00", "image"),
    (0, b"MM\x00*", "image"),
    (0, b"II+\x00", "image"),
    (0, b"MM\x00+", "image"),
    (0, b"{\\rtf", "rtf"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "compound file"),
    *((4, b"ftyp" + brand, "image") for brand in (b"heic", b"heix", b"heim", b"heis", b"mif1", b"avif")),
)

# Offset, bytes, and what it is, for formats that hold text but are not read.
_UNREAD = (
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"MSCF\x00\x00\x00\x00", "a cabinet archive"),
    (0, b"\x04\x22\x4d\x18", "LZ4"),
    (0, b"\x1f\x9d", "an old compressed file (.Z)"),
    (0, b"LZIP\x01", "lzip"),
    (0, b"!<arch>\n", "an archive of object files or a Debian package"),
    (0, b"\xed\xab\xee\xdb", "an RPM package"),
    (0, b"FEA1", "Feather version 1"),
    (0, b"Obj\x01", "Avro"),
    (0, b"ORC\n", "ORC"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"8BPS\x00\x01", "a Photoshop image"),
    (0, b"AT&TFORM", "DjVu"),
    (60, b"BOOKMOBI", "a Mobipocket book"),
)

# The same for what holds no text.
_BINARY = (
    (0, b"\x7fELF", "a program or library (ELF)"),
    (0, b"\xca\xfe\xba\xbe", "compiled code (Java or Mach-O)"),
    (0, b"\xcf\xfa\xed\xfe", "a program or library (Mach-O)"),
    (0, b"\xce\xfa\xed\xfe", "a program or library (Mach-O)"),
    (0, b"\x00asm", "WebAssembly"),
    (0, b"\x1bLua", "compiled Lua"),
    (0, b"BC\xc0\xde", "LLVM bitcode"),
    (0, b"\x00\x01\x00\x00\x00", "a TrueType font"),
    (0, b"OTTO\x00", "an OpenType font"),
    (0, b"ttcf\x00", "a font collection"),
    (0, b"wOFF", "a web font"),
    (0, b"wOF2", "a web font"),
    (0, b"\x00\x00\x01\x00", "an icon"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"GGUF", "model weights (GGUF)"),
    (0, b"ID3", "MP3 audio"),
    (0, b"OggS\x00", "Ogg audio or video"),
    (0, b"fLaC\x00", "FLAC audio"),
    (0, b"MThd\x00\x00\x00\x06", "MIDI music"),
    (0, b"\x1aE\xdf\xa3", "Matroska video"),
    (4, b"ftyp", "MP4 audio or video"),
    (0, b"FLV\x01", "Flash video"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows audio or video"),
    (0, b"PACK\x00\x00\x00", "a git pack"),
    (0, b"\xfftOc", "a git pack index"),
    (0, b"DIRC\x00\x00\x00", "a git index"),
    (0, b"\xde\x12\x04\x95", "compiled translations"),
    (0, b"\x95\x04\x12\xde", "compiled translations"),
    (0, b"TZif", "time zone data"),
    (8, b"WAVEfmt ", "audio"),
    (8, b"AVI LIST", "video"),
)

_ENCRYPTED = ((0, b"PARE", "an encrypted Parquet file"),)


def signature(head: bytes) -> str:
    """The type that the first kilobytes of a file show, empty when they show none that is read; `head` is not empty."""
    return _shown(_SIGNATURES, head) or next((name for name, matches in _STRUCTURES.items() if matches(head)), "")


def unread_format(head: bytes) -> tuple[str, str] | None:
    """Reason (``unsupported``, ``binary`` or ``encrypted``) and name of a format that is known but not read."""
    for reason, table in (("unsupported", _UNREAD), ("binary", _BINARY), ("encrypted", _ENCRYPTED)):
        name = _shown(table, head)
        if name:
            return reason, name
    if head.startswith(b"MZ") and b"\0" in head[:64]:
        return "binary", "a program or library (Windows)"
    return ("binary", "compiled Python") if _PYTHON_BYTECODE.match(head) else None


def _shown(table: Iterable[tuple[int, bytes, str]], head: bytes) -> str:
    for offset, magic, name in table:
        # A text may begin with the same letters; a file of the format then has zeros among its numbers.
        if head.startswith(magic, offset) and (not magic.isalnum() or b"\0" in head):
            return name
    return ""


def gzip_beginning(head: bytes, count: int) -> bytes:
    """At most `count` bytes of what the beginning of a gzip file unpacks to; fewer when it is damaged."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, count)
    except zlib.error:
        return b""


def is_tar_header(block: bytes) -> bool:
    """Whether a block of 512 bytes is a tar header: its bytes add up to the checksum that stands in it."""
    stored = _OCTAL.match(block[_TAR_CHECKSUM])
    if stored is None or len(block) < _TAR_BLOCK or block[0] == 0:
        return False
    # While it was computed the field itself held blanks.
    others = block[: _TAR_CHECKSUM.start] + b" " * 8 + block[_TAR_CHECKSUM.stop : _TAR_BLOCK]
    signed = sum(others) - 256 * sum(byte > 127 for byte in others)
    return int(stored[1], 8) in (sum(others), signed)


def is_pdf(head: bytes) -> bool:
    """Whether a PDF header stands at the beginning, or further on in what is not text."""
    position = head.find(b"%PDF-", 0, _PDF_WITHIN)
    return position >= 0 and (not head[:position].strip(b"\xef\xbb\xbf \t\r\n\0") or b"\0" in head)


def is_mail(head: str) -> bool:
    """Whether a text begins with the header of a message that was sent (RFC 5322)."""
    header = _HEADER.match(head)
    names = {name.lower() for name in _FIELD.findall(header[0])} if header else set()
    return len(names & _MAIL_FIELDS) > (1 if "from" in names else 2)


def is_mailbox(head: str) -> bool:
    """Whether a text begins with the line that parts the messages of a mailbox, and a message."""
    first, _, rest = head.partition("\n")
    return _MAILBOX.match(first) is not None and _HEADER.match(rest) is not None


def is_warc(head: bytes) -> bool:
    """Whether a record of a web archive begins here."""
    return _WARC.match(head) is not None


def _is_bzip2(head: bytes) -> bool:
    # The block's magic is the number pi, the end's its square root.
    blocks = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")
    return head.startswith(b"BZh") and head[3:4] in b"123456789" and head.startswith(blocks, 4)


def _is_skippable_frame(head: bytes) -> bool:
    """What zstd programs that work in parallel put in front of the data."""
    return head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50


def _is_arrow_stream(head: bytes) -> bool:
    """A message of the Arrow IPC stream: a continuation mark, then the length of its metadata, a multiple of 8."""
    if not head.startswith(b"\xff\xff\xff\xff") or len(head) < 16:
        return False
    length, table = struct.unpack_from("<iI", head, 4)
    return length > 0 and length % 8 == 0 and length < 2**28 and 0 < table < length


def _is_other_image(head: bytes) -> bool:
    """GIF, BMP and WebP, whose first letters may begin a text."""
    if head.startswith((b"GIF87a", b"GIF89a")):
        return b"\0" in head[:256] or not head[:256].isascii()
    if head.startswith(b"RIFF"):
        return head[8:12] == b"WEBP"
    if not head.startswith(b"BM") or len(head) < 18:
        return False
    reserved, _, header = struct.unpack_from("<III", head, 6)
    return reserved == 0 and header in _BMP_HEADERS


_STRUCTURES: dict[str, Callable[[bytes], bool]] = {
    "pdf": is_pdf,
    "warc": is_warc,
    "bzip2": _is_bzip2,
    "zstd": _is_skippable_frame,
    "tar": is_tar_header,
    "image": _is_other_image,
    "arrow": _is_arrow_stream,
}
