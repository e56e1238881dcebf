"""Documents: the units that are kept or removed, go to the training or validation split, and end in ``<eos>``."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import zstandard

from sheepop.core.errors import DataError
from sheepop.data.config import DocumentMode
from sheepop.data.extract.template import PAIR, sides

_LINE_END = re.compile(r"\r\n|\r|\n")
# Atomic groups, so that a CR LF does not match as two line ends.
_BLANK_LINES = re.compile(r"(?>\r\n|\r|\n)(?:[^\S\r\n]*+(?>\r\n|\r|\n))+")
_LAST_LINE_END = re.compile(r"(?>\r\n|\r|\n)\Z")
_SUFFIX = ".jsonl.zst"
_COMPRESSED_BLOCK = 2**14
_WRITE_BYTES = 2**16
_OPTIONAL = ("language", "place", "marks", "facts")
_LINE_BEGINNING = re.compile(rb'\{"id":"([0-9a-f]{32})","bytes":(\d+),')


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its origin: document number `part` of the file `source`.

    `id` is the hash of the text, `num_bytes` its length in UTF-8. `kind` is ``prose``, ``code``, ``table``, ``chat`` or
    ``pair``. `place` is its place in the file, `marks` are the starts of pages, slides or cells in the text (offset in
    characters, name), `facts` the metadata of the file. `Document.of` makes one.
    """

    text: str
    source: str
    part: int
    id: str
    num_bytes: int
    kind: str = "prose"
    language: str = ""
    place: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, source: str, part: int, **about: Any) -> Document:
        """Makes a document with its id (128 bits of BLAKE2b over the UTF-8 bytes, hexadecimal) and length."""
        data = text.encode("utf-8")
        # Two pairs may have the same joined text, split into source and target at different offsets.
        parting = str(about["marks"][-1][0]).encode("ascii") if about.get("kind") == PAIR else b""
        identity = hashlib.blake2b(data, digest_size=16, key=parting).hexdigest()
        return cls(text, source, part, identity, len(data), **about)

    def draft(self) -> Draft:
        """A mutable copy for the cleaning stages."""
        marks, facts = list(self.marks), dict(self.facts)
        return Draft(self.text, self.source, self.part, self.kind, self.language, self.place, marks, facts)

    def stored(self) -> StoredDocument:
        """The document in its form on disk."""
        about: dict[str, Any] = {"source": self.source, "part": self.part, "kind": self.kind}
        about |= {name: value for name in _OPTIONAL if (value := getattr(self, name))}
        about["text"] = self.text
        beginning = f'{{"id":"{self.id}","bytes":{self.num_bytes},'.encode("ascii")
        return StoredDocument(self.id, self.num_bytes, beginning + orjson.dumps(about)[1:] + b"\n")


class Pair(NamedTuple):
    """The text to read and the text to write."""

    source: str
    target: str

    @classmethod
    def of(cls, document: Document) -> Pair:
        """The pair in a document; raises `DataError` if its marks do not separate source and target."""
        found = sides(document.text, document.marks)
        if found is None:
            raise DataError(f"{document.source}, {document.place}: it is not a pair of source and target.")
        return cls(*found)


@dataclass(slots=True)
class Draft:
    """A document that cleaning stages may change; see `Document`."""

    text: str
    source: str
    part: int
    kind: str = "prose"
    language: str = ""
    place: str = ""
    marks: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    language_score: float | None = None
    """The confidence in the detected language, from 0 to 1; None if it was not detected."""

    def finished(self) -> Document:
        """The document as the stages left it."""
        about = {"kind": self.kind, "language": self.language, "place": self.place, "facts": self.facts}
        return Document.of(self.text, self.source, self.part, marks=tuple(self.marks), **about)


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as a line of JSON whose first fields are id and length, so that it can be moved without parsing."""

    id: str
    num_bytes: int
    line: bytes

    @classmethod
    def from_line(cls, line: bytes) -> StoredDocument:
        """Reads only id and length; raises ValueError if `line` does not begin with them."""
        match = _LINE_BEGINNING.match(line)
        if match is None:
            raise ValueError("a line is not a stored document")
        return cls(match[1].decode("ascii"), int(match[2]), line)

    def document(self) -> Document:
        """Parses the whole document."""
        record = orjson.loads(self.line)
        marks = tuple((int(offset), str(name)) for offset, name in record.pop("marks", ()))
        return Document(num_bytes=record.pop("bytes"), marks=marks, **record)


def split_text(text: str, mode: DocumentMode) -> list[str]:
    """Cuts the text of a file into documents.

    ``file``: the whole text. ``line``: the lines without their ends (LF, CR LF or CR); an empty rest after the last
    line end is dropped. ``blank_line``: the blocks between lines of white space; a block keeps its indentation and
    inner newlines, and loses the line end after its last line.
    """
    if mode == "file":
        return [text]
    if mode == "line":
        lines = _LINE_END.split(text) if "\r" in text else text.split("\n")
        return lines[:-1] if not lines[-1] else lines
    # Line ends before and after the text make its first and last lines like all others.
    blocks = _BLANK_LINES.split(f"\n{text}\n")
    blocks[0] = blocks[0].removeprefix("\n")
    blocks[-1] = _LAST_LINE_END.sub("", blocks[-1])
    return [block for block in blocks if not is_empty(block)]


def is_empty(text: str) -> bool:
    """Whether a text is empty or only white space."""
    return not text or text.isspace()


def stored_file(directory: Path, prefix: str) -> io.BufferedWriter:
    """Opens the compressed file ``PREFIX-00000.jsonl.zst`` in a directory for lines of stored documents."""
    path = directory / f"{prefix}-00000{_SUFFIX}"
    compressed = zstandard.ZstdCompressor().stream_writer(path.open("wb"), closefd=True)
    # The buffer passes many lines at once: one call per line would cost more than compressing a short line.
    return io.BufferedWriter(cast(io.RawIOBase, compressed), _WRITE_BYTES)


def read_stored(directory: Path, prefix: str) -> Iterator[StoredDocument]:
    """Yields the documents in the files with this prefix, in order; raises `DataError` for a damaged file."""
    return chain.from_iterable(map(_read_stored_file, sorted(directory.glob(f"{prefix}-*{_SUFFIX}"))))


def read_documents_file(path: Path) -> Iterator[Document]:
    """Yields the documents of one file, in order; raises `DataError` if it is damaged."""
    return (stored.document() for stored in _read_stored_file(path))


def _read_stored_file(path: Path) -> Iterator[StoredDocument]:
    decompressor, rest = zstandard.ZstdDecompressor().decompressobj(), list[bytes]()
    try:
        with path.open("rb") as file:
            while block := file.read(_COMPRESSED_BLOCK):
                *lines, tail = decompressor.decompress(block).split(b"\n")
                for line in lines:
                    yield StoredDocument.from_line(b"".join([*rest, line, b"\n"]))
                    rest = []
                rest.append(tail)
        if not decompressor.eof or any(rest):
            raise ValueError("it ends too early")
    except (zstandard.ZstdError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}). Build the corpus again.") from None


def batched_by_size(documents: Iterable[StoredDocument], num_bytes: int) -> Iterator[list[StoredDocument]]:
    """Groups consecutive documents into lists of at most `num_bytes` bytes of text; a longer document is alone."""
    batch: list[StoredDocument] = []
    size = 0
    for document in documents:
        if batch and size + document.num_bytes > num_bytes:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.num_bytes
    if batch:
        yield batch
