"""Detects the type of a file, mainly by its content; the name only chooses between text formats.

The checks are, in this order: signatures of binary formats; for text the suffix or name of the file, or a ``#!`` line;
the beginning of mail, HTML and XML; and last, if nothing else matched, the magika model, if it is installed.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from sheepop.data.decoding import BYTES_A_NUL, CONTROLS, wide_encoding
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.languages import by_word, text_type

HEAD_BYTES = 2**12
"""The number of bytes of a file that `detect` looks at first."""

_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)
_OCTAL = re.compile(rb"[ \0]*([0-7]{1,7})[ \0]*\Z")

# The signatures of binary formats: offset, bytes or pattern, the reason why it is not read (empty if it is), and the
# name. The first match counts.
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

_MOST_CONTROLS = 0.1

# Text formats and their suffixes.
_TEXT_FORMATS = by_word(
    "html: html htm xhtml shtml, xml: xml rss atom kml gpx opml, json: json geojson webmanifest har, "
    "jsonl: jsonl ndjson jsonlines, csv, tsv: tsv tab, subtitles: srt vtt ass ssa, notebook: ipynb, "
    "mail: eml mht mhtml, mailbox: mbox"
)
# Formats that begin with a signature, and their suffixes: without the signature the file is damaged or something else.
_SIGNED = by_word(
    "image: png jpg jpeg tif tiff webp bmp gif heic avif, zip: zip jar whl docx pptx xlsx xlsb odt ods odp epub, "
    "old Office: doc xls ppt msg, gzip: gz tgz, bzip2: bz2 tbz2, xz: xz txz, zstd: zst tzst, tar, "
    "sqlite: sqlite sqlite3, DuckDB: duckdb, PDF: pdf, Parquet: parquet, Arrow: arrow, WARC: warc"
)
# The type that a zip states in its first member, called mimetype and stored raw (EPUB OCF 3.3, 4.3; ODF 1.3, 2-3.3).
_MIMETYPE = re.compile(rb".{30}mimetype.{0,64}?(application/[\w.+-]+)", re.DOTALL)
_OPEN_DOCUMENT = b"application/vnd.oasis.opendocument."
# The format of a zip by the beginning of its mimetype, and by a member or folder of an office package.
_MIMETYPES = {b"application/epub+zip": "epub", _OPEN_DOCUMENT + b"text": "odt"}
_MIMETYPES |= {_OPEN_DOCUMENT + b"spreadsheet": "ods", _OPEN_DOCUMENT + b"presentation": "odp"}
_MEMBERS = {b"xl/workbook.bin": "xlsb", b"word/": "docx", b"xl/": "xlsx", b"ppt/": "pptx"}
_DIRECTORY_ENTRY = re.compile(rb"PK\x01\x02.{24}(..).{16}", re.DOTALL)
_LONGEST_END = 2**16 + 22
_DIRECTORY_BYTES = 2**20
# The stream at the root of a compound file that identifies its format.
_STREAMS = {"WordDocument": "doc", "Workbook": "xls", "Book": "xls", "PowerPoint Document": "ppt"}
_STREAMS |= {"__properties_version1.0": "msg"}
_LARGE_FILE_POINTER = b"version https://git-lfs.github.com/spec/"

# The header lines of a message, each with its continuation lines, and names of fields that mail programs add.
_HEADER = re.compile(r"(?:[!-9;-~]+:[^\n]*+\n(?:[ \t][^\n]*+\n)*+)++")
_FIELD = re.compile(r"^([!-9;-~]+):", re.MULTILINE)
_MAIL_FIELDS = frozenset({"date", "message-id", "mime-version", "received", "return-path", "delivered-to"})
# The line that separates the messages of a mailbox, and a header.
_MAILBOX = re.compile(r"From \S+ +\w{3} \w{3} +\d{1,2} \d\d:\d\d:\d\d .*\d{4}[^\S\n]*\n" + _HEADER.pattern)
# Possessive: otherwise comments that could end in several places would be tried in every combination.
_HTML = re.compile(r"(?is)(?:\s++|(?><!--.*?-->)|(?><\?xml[^>]*>))*+<(?:!doctype\s+html|html|head|body)\b")
# An XML declaration, a document type that names its file (optional in SGML), or an element with a namespace.
_XML = re.compile(
    r"(?:\s++|(?><!--.*?-->))*+<(?:\?xml\s|!DOCTYPE\s+[\w:.-]+\s*(?:\[|(?:SYSTEM|PUBLIC\s+(?:\"[^\"]*\"|'[^']*'))\s+[\"'])"
    r"|[A-Za-z_][\w:.-]*+\s(?:[^<>]*\s)?xmlns(?::[\w.-]+)?\s*=)",
    re.DOTALL,
)

# Below this score the model still tells code from prose, but is often wrong about the language.
_SURE = 0.95
# Our names for the model's labels; the label of any other language is its name.
_LABELS = by_word("notebook: ipynb, markdown, rst, latex, html, xml, csv, tsv, json, jsonl")
_LABEL_LANGUAGES = by_word(
    "c++: cpp, c#: cs, common lisp: lisp, objective-c: objectivec, visual basic: vba, sass: scss, protobuf: proto, "
    "assembly: asm, template: erb"
)


@dataclass(frozen=True, slots=True)
class FileType:
    """The `name` of a type as in the table `FORMATS`, and for code its language."""

    name: str
    language: str = ""


def detect(content: Content, head: bytes | None = None) -> FileType:
    """Returns the type of `content`; `head` is its first `HEAD_BYTES`, if they have been read already.

    Raises `ExtractionError`: ``empty``; ``encrypted``; ``unsupported`` for a known format that cannot be read;
    ``binary`` for an unknown format that is not text; ``damaged`` without the signature that the suffix promises;
    ``not_installed``; ``missing`` for a Git LFS pointer.
    """
    head = content.head(HEAD_BYTES) if head is None else head[:HEAD_BYTES]
    if not head:
        raise ExtractionError("empty", "0 bytes")
    name = _binary_format(content, head)
    if name:
        return FileType(name)
    return _text_format(content, head) if is_text(head) else _unknown(content)


def is_text(head: bytes) -> bool:
    """Returns whether bytes may be text in some encoding: hardly any NUL outside UTF-16 and UTF-32, few controls."""
    if wide_encoding(head):
        return True
    controls = len(head) - len(head.translate(None, CONTROLS))
    return head.count(0) <= len(head) // BYTES_A_NUL and controls <= _MOST_CONTROLS * len(head)


def _binary_format(content: Content, head: bytes) -> str:
    reason, name = signature(head)
    if reason:
        raise ExtractionError(reason, f"it is {name}")
    if name == "zip":
        return _zip_format(content, head)
    if name == "gzip":
        try:
            beginning = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 256)
        except zlib.error:
            beginning = b""
        return "warc" if signature(beginning)[1] == "warc" else name
    return _compound_format(content) if name == "compound file" else name


def _zip_format(content: Content, head: bytes) -> str:
    mimetype = match[1] if (match := _MIMETYPE.match(head)) else b""
    if name := _mimetype_name(mimetype):
        return name
    with content.open() as file:
        names = _zip_names(file)
        # Another program may have packed an OpenDocument file again, with other members first.
        is_repacked = not mimetype and {b"content.xml", b"mimetype"} <= names
        if is_repacked and (name := _mimetype_name(_stated_mimetype(file))):
            return name
    if b"FixedDocumentSequence.fdseq" in names or b"FixedDocSeq.fdseq" in names:
        raise ExtractionError("unsupported", "it is an XPS document")
    if b"visio/document.xml" in names:
        raise ExtractionError("unsupported", "it is a Visio drawing")
    for begin, name in _MEMBERS.items() if b"[Content_Types].xml" in names else ():
        if any(member.startswith(begin) for member in names):
            return name
    return "epub" if b"META-INF/container.xml" in names and content.suffix == ".epub" else "zip"


def _mimetype_name(mimetype: bytes) -> str:
    for begin, name in _MIMETYPES.items():
        if mimetype.startswith(begin):
            return name
    if mimetype.startswith(_OPEN_DOCUMENT):
        raise ExtractionError("unsupported", "it is an OpenDocument drawing, formula or database")
    return ""


def _stated_mimetype(file: BinaryIO) -> bytes:
    """Returns the beginning of the member ``mimetype``, empty if it cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open("mimetype") as member:
            return member.read(128)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, OSError):
        return b""


def _zip_names(file: BinaryIO) -> set[bytes]:
    """Returns the first few thousand member names, none if damaged; zipfile would read a directory of any size."""
    size = file.seek(0, os.SEEK_END)
    begin = file.seek(max(0, size - _LONGEST_END))
    end = file.read()
    position = end.rfind(b"PK\x05\x06")
    length = int.from_bytes(end[position + 12 : position + 16], "little") if position >= 0 else 0
    # The directory ends where this record begins, also if a self-extracting program precedes the archive.
    file.seek(max(0, begin + position - length))
    directory = file.read(min(length, _DIRECTORY_BYTES))
    entries = ((entry.end(), int.from_bytes(entry[1], "little")) for entry in _DIRECTORY_ENTRY.finditer(directory))
    return {directory[begin : begin + size] for begin, size in entries}


def _compound_format(content: Content) -> str:
    """Returns the format of a compound file, the container of old office formats ([MS-CFB]), by its root streams."""
    try:
        from olefile import OleFileIO
    except ImportError:
        raise ExtractionError("not_installed", "an old Microsoft Office file: install sheepop[data]") from None
    with content.open() as file:
        try:
            names = {entry[0] for entry in OleFileIO(file).listdir(storages=False) if len(entry) == 1}
        except Exception as error:
            # olefile raises whatever Python error a malformed container causes.
            raise ExtractionError("damaged", f"an old Microsoft Office file that cannot be opened: {error}") from None
    if "EncryptedPackage" in names:
        raise ExtractionError("encrypted", "an office file that needs a password")
    if "Text_Content" in names:
        raise ExtractionError("unsupported", "it is a presentation of PowerPoint 95")
    known = next((name for stream, name in _STREAMS.items() if stream in names), None)
    if known is None:
        raise ExtractionError("unsupported", "it is a file of an old Microsoft program that is not read")
    return known


def _text_format(content: Content, head: bytes) -> FileType:
    if head.startswith(_LARGE_FILE_POINTER):
        raise ExtractionError("missing", "it is a Git LFS pointer; the content itself is stored elsewhere")
    if name := _TEXT_FORMATS.get(content.suffix[1:]):
        return FileType(name)
    encoding, mark = wide_encoding(head) or ("utf-8-sig", 0)
    beginning = head[mark:].decode(encoding, "replace")
    if known := text_type(content.name, beginning):
        return FileType(*known)
    for looks_like, name in (
        (_MAILBOX.match, "mailbox"),
        (_is_mail, "mail"),
        (_HTML.match, "html"),
        (_XML.match, "xml"),
    ):
        if looks_like(beginning):
            return FileType(name)
    return _guessed(content)


def _is_mail(beginning: str) -> bool:
    """Returns whether a text begins with the header of a sent message (RFC 5322)."""
    header = _HEADER.match(beginning)
    names = {name.lower() for name in _FIELD.findall(header[0])} if header else set()
    return len(names & _MAIL_FIELDS) > (1 if "from" in names else 2)


def _unknown(content: Content) -> FileType:
    """Returns "text", whose reader tells more, if name or model say so; raises `ExtractionError` for binary."""
    suffix = content.suffix[1:]
    if suffix in _TEXT_FORMATS or text_type(content.name, ""):
        return FileType("text")
    if suffix in _SIGNED:
        raise ExtractionError("damaged", f"it does not begin like a file of type {_SIGNED[suffix]}")
    answer = _model_answer(content)
    if answer is None or answer.output.label == "unknown":
        raise ExtractionError("binary", "it is neither text nor in a known format")
    if not answer.output.is_text:
        raise ExtractionError("unsupported", f"it is most likely {answer.output.description}")
    return FileType("text")


def _guessed(content: Content) -> FileType:
    """Returns the type of a text by the model; plain text without the model, or if the model takes it for binary."""
    answer = _model_answer(content)
    if answer is None or not answer.output.is_text:
        return FileType("text")
    label, is_sure = str(answer.output.label), answer.score >= _SURE
    if is_sure and label in _LABELS:
        return FileType(_LABELS[label])
    if answer.output.group != "code":
        return FileType("text")
    return FileType("code", _LABEL_LANGUAGES.get(label, label) if is_sure else "")


def _model_answer(content: Content) -> Any:
    model = _model()
    if model is None:
        return None
    with content.open() as file:
        return model.identify_stream(file)


@lru_cache(maxsize=1)
def _model() -> Any:
    """Returns the model, loaded once in a process, or None if magika is not installed."""
    try:
        from magika import Magika
    except ImportError:
        return None
    return Magika()


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
