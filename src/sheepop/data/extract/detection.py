"""Detects the type of a file, mainly by its content; the name only chooses between text formats.

The checks are, in this order: signatures of binary formats; for text the suffix or name of the file, or a ``#!`` line;
the beginning of mail, HTML and XML; and last, if nothing else matched, the magika model, if it is installed.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from sheepop.data.decoding import CONTROLS, wide_encoding
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.languages import by_word, text_type
from sheepop.data.extract.magic import signature

HEAD_BYTES = 2**12
"""The number of bytes of a file that `detect` looks at first."""

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
    """Returns whether bytes may be text in some encoding: no NUL outside UTF-16 and UTF-32, few control characters."""
    if wide_encoding(head):
        return True
    controls = len(head) - len(head.translate(None, CONTROLS))
    return b"\0" not in head and controls <= _MOST_CONTROLS * len(head)


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
    for begin, name in _MIMETYPES.items():
        if mimetype.startswith(begin):
            return name
    if mimetype.startswith(_OPEN_DOCUMENT):
        raise ExtractionError("unsupported", "it is an OpenDocument drawing, formula or database")
    with content.open() as file:
        names = _zip_names(file)
    for begin, name in _MEMBERS.items() if b"[Content_Types].xml" in names else ():
        if any(member.startswith(begin) for member in names):
            return name
    return "epub" if b"META-INF/container.xml" in names and content.suffix == ".epub" else "zip"


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
