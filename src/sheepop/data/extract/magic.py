"""The signatures of binary formats: bytes that identify a file whatever its name is."""

from __future__ import annotations

import re
import struct

_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]{1,7})[ \0]*\Z")

# Offset, bytes or pattern, the reason why the format is not read (empty if it is), its name. The first match counts.
_SIGNATURES: tuple[tuple[int, bytes | re.Pattern[bytes], str, str], ...] = (
    (0, re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08PK\x03\x04)"), "", "zip"),
    (0, b"\x1f\x8b\x08", "", "gzip"),
    (0, b"\xfd7zXZ\x00", "", "xz"),
    # The second kind are skippable frames, which parallel compressors write before the data.
    (0, re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "", "zstd"),
    (0, b"SQLite format 3\x00", "", "sqlite"),
    (8, b"DUCK", "", "duckdb"),
    (0, b"PAR1", "", "parquet"),
    (0, b"ARROW1\x00\x00", "", "arrow"),
    # PNG, JPEG, TIFF.
    (0, re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|II[*+]\x00|MM\x00[*+]"), "", "image"),
    (4, re.compile(rb"ftyp(?:hei[cxms]|mif1|avif)"), "", "image"),
    (0, b"{\\rtf", "", "rtf"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "", "compound file"),
    # At the beginning, or within the first kilobyte of a file that is not text.
    (0, re.compile(rb"(?s:(?:[\xef\xbb\xbf \t\r\n\0]{0,1019}|(?=[^\0]*+\0).{0,1019}?)%PDF-)"), "", "pdf"),
    # The second is ARC, its predecessor.
    (0, re.compile(rb"WARC/\d+\.\d+\r?\n|filedesc://\S{1,200} [\d.]+ \d{14} text/plain "), "", "warc"),
    # The magic number of a block is pi; that of the end is its square root.
    (0, re.compile(rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)"), "", "bzip2"),
    # GIF, WebP, BMP: a text may begin with the letters alone. In BMP the last byte is the size of the second header, of
    # OS/2 1 and 2 and Windows 3 to 5.
    (0, re.compile(rb"(?s:GIF8[79]a.{0,249}?[\0\x80-\xff]|RIFF.{4}WEBP)"), "", "image"),
    (0, re.compile(rb"(?s:BM.{4}\0{4}.{4}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0{3})"), "", "image"),
    (0, b"7z\xbc\xaf\x27\x1c", "unsupported", "a 7-Zip archive"),
    (0, b"Rar!\x1a\x07", "unsupported", "a RAR archive"),
    (0, b"MSCF\x00\x00\x00\x00", "unsupported", "a cabinet archive"),
    (0, b"\x04\x22\x4d\x18", "unsupported", "LZ4"),
    (0, b"\x1f\x9d", "unsupported", "an old compressed file (.Z)"),
    (0, b"LZIP\x01", "unsupported", "lzip"),
    (0, b"!<arch>\n", "unsupported", "an archive of object files or a Debian package"),
    (0, b"\xed\xab\xee\xdb", "unsupported", "an RPM package"),
    (0, b"FEA1", "unsupported", "Feather version 1"),
    (0, b"Obj\x01", "unsupported", "Avro"),
    (0, b"ORC\n", "unsupported", "ORC"),
    (0, b"\x89HDF\r\n\x1a\n", "unsupported", "HDF5"),
    (0, b"8BPS\x00\x01", "unsupported", "a Photoshop image"),
    (0, b"AT&TFORM", "unsupported", "DjVu"),
    (60, b"BOOKMOBI", "unsupported", "a Mobipocket book"),
    (0, b"\x7fELF", "binary", "a program or library (ELF)"),
    (0, b"\xca\xfe\xba\xbe", "binary", "compiled code (Java or Mach-O)"),
    (0, re.compile(rb"[\xce\xcf]\xfa\xed\xfe"), "binary", "a program or library (Mach-O)"),
    (0, b"\x00asm", "binary", "WebAssembly"),
    (0, b"\x1bLua", "binary", "compiled Lua"),
    (0, b"BC\xc0\xde", "binary", "LLVM bitcode"),
    (0, b"\x00\x01\x00\x00\x00", "binary", "a TrueType font"),
    (0, b"OTTO\x00", "binary", "an OpenType font"),
    (0, b"ttcf\x00", "binary", "a font collection"),
    (0, re.compile(rb"wOF[F2]"), "binary", "a web font"),
    (0, b"\x00\x00\x01\x00", "binary", "an icon"),
    (0, b"\x93NUMPY", "binary", "a NumPy array"),
    (0, b"GGUF", "binary", "model weights (GGUF)"),
    (0, b"ID3", "binary", "MP3 audio"),
    (0, b"OggS\x00", "binary", "Ogg audio or video"),
    (0, b"fLaC\x00", "binary", "FLAC audio"),
    (0, b"MThd\x00\x00\x00\x06", "binary", "MIDI music"),
    (0, b"\x1aE\xdf\xa3", "binary", "Matroska video"),
    (4, b"ftyp", "binary", "MP4 audio or video"),
    (0, b"FLV\x01", "binary", "Flash video"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "binary", "Windows audio or video"),
    (0, b"PACK\x00\x00\x00", "binary", "a git pack"),
    (0, b"\xfftOc", "binary", "a git pack index"),
    (0, b"DIRC\x00\x00\x00", "binary", "a git index"),
    (0, re.compile(rb"\xde\x12\x04\x95|\x95\x04\x12\xde"), "binary", "compiled translations"),
    (0, b"TZif", "binary", "time zone data"),
    (8, b"WAVEfmt ", "binary", "audio"),
    (8, b"AVI LIST", "binary", "video"),
    (0, b"PARE", "encrypted", "an encrypted Parquet file"),
    (0, re.compile(rb"(?s:MZ.{0,61}?\0)"), "binary", "a program or library (Windows)"),
    (0, re.compile(rb"(?s:.[\x0b-\x10]\r\n[\x00-\x07]\0\0\0)"), "binary", "compiled Python"),
)
_PATTERNS = [
    (re.compile(b"(?s:.{%d})(%s)" % (at, re.escape(magic) if isinstance(magic, bytes) else magic.pattern)), why, name)
    for at, magic, why, name in _SIGNATURES
]
_ANY = re.compile(b"|".join(pattern.pattern for pattern, *_ in _PATTERNS))


def signature(head: bytes) -> tuple[str, str]:
    """Returns (reason, name) of the format that the first kilobytes show; two empty strings if there is none.

    The reason is empty for a format that is read, else ``unsupported`` for a format with text, ``binary`` for one
    without text, or ``encrypted``.
    """
    # Tar comes first, because a tar archive also contains the beginning of its first member.
    if is_tar_header(head):
        return "", "tar"
    if _is_arrow_stream(head):
        return "", "arrow"
    for pattern, reason, name in _PATTERNS if _ANY.match(head) else ():
        found = match[1] if (match := pattern.match(head)) else b""
        # A text may begin with the same letters; a file of the format has NUL bytes as well.
        if found and (not found.isalnum() or b"\0" in head):
            return reason, name
    return "", ""


def is_tar_header(block: bytes) -> bool:
    """Returns whether a block of 512 bytes is a tar header: the sum of its bytes equals the checksum in it."""
    stored = _OCTAL.match(block[_TAR_CHECKSUM])
    if stored is None or len(block) < _TAR_BLOCK or block[0] == 0:
        return False
    # The checksum is computed with blanks in its own field; some programs sum signed bytes.
    others = block[: _TAR_CHECKSUM.start] + b" " * 8 + block[_TAR_CHECKSUM.stop : _TAR_BLOCK]
    signed = sum(others) - 256 * sum(byte > 127 for byte in others)
    return int(stored[1], 8) in (sum(others), signed)


def _is_arrow_stream(head: bytes) -> bool:
    """Returns whether an Arrow IPC message begins here: a mark, then the metadata length, a multiple of 8."""
    if not head.startswith(b"\xff\xff\xff\xff") or len(head) < 16:
        return False
    length, table = struct.unpack_from("<iI", head, 4)
    return length > 0 and length % 8 == 0 and length < 2**28 and 0 < table < length
