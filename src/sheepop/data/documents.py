"""Documents: the units that are kept or dropped, go to training or validation, and end in ``<eos>``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from sheepop.core.errors import DataError
from sheepop.data.config import DocumentMode

_LINE_END = re.compile(r"\r\n|\r|\n")
# Atomic groups: a CR LF must not be taken for two line ends.
_BLANK_LINES = re.compile(r"(?>\r\n|\r|\n)(?:[^\S\r\n]*+(?>\r\n|\r|\n))+")
_LAST_LINE_END = re.compile(r"(?>\r\n|\r|\n)\Z")
_SUFFIX = ".jsonl.zst"
_COMPRESSED_BLOCK = 2**14


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its origin: the `part`-th document of the file `source`; `id` is the hash of its content."""

    text: str
    source: str
    part: int
    id: str

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text) if self.text.isascii() else len(self.text.encode("utf-8"))


def content_id(text: str) -> str:
    """32 hexadecimal digits of the BLAKE2b hash of the text's UTF-8 bytes; equal texts, equal ids."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def split_text(text: str, mode: DocumentMode) -> list[str]:
    """Cuts the text of a file into documents.

    ``file``: the text as it is. ``line``: the lines without their ends (LF, CR LF or CR); what follows the last
    line end counts only when there is something. ``blank_line``: the blocks between lines of white space; a block
    keeps its indentation and inner newlines, and loses the line end after its last line.
    """
    if mode == "file":
        return [text]
    if mode == "line":
        lines = _LINE_END.split(text) if "\r" in text else text.split("\n")
        return lines[:-1] if not lines[-1] else lines
    # With a line end before and after it, the text's first and last lines are like any other.
    blocks = _BLANK_LINES.split(f"\n{text}\n")
    blocks[0] = blocks[0].removeprefix("\n")
    blocks[-1] = _LAST_LINE_END.sub("", blocks[-1])
    return [block for block in blocks if not is_empty(block)]


def is_empty(text: str) -> bool:
    """Whether a document holds nothing but white space."""
    return not text or text.isspace()


class DocumentWriter:
    """Writes documents to ``PREFIX-00000.jsonl.zst`` and on, a new file after `file_bytes` of uncompressed lines."""

    def __init__(self, directory: Path, prefix: str, *, level: int = 3, file_bytes: int = 2**28) -> None:
        self._directory, self._prefix, self._level, self._file_bytes = directory, prefix, level, file_bytes
        self._file: IO[bytes] | None = None
        self._files = self._size = 0

    def write(self, document: Document) -> None:
        """Appends one document."""
        record = {"id": document.id, "source": document.source, "part": document.part, "text": document.text}
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        if self._file is None:
            self._file = self._open()
        self._file.write(line)
        self._size += len(line)
        if self._size >= self._file_bytes:
            self.close()

    def close(self) -> None:
        """Finishes the current file."""
        if self._file is not None:
            self._file.close()
        self._file, self._size = None, 0

    def _open(self) -> IO[bytes]:
        path = self._directory / f"{self._prefix}-{self._files:05d}{_SUFFIX}"
        self._files += 1
        compressor = zstandard.ZstdCompressor(level=self._level)
        return compressor.stream_writer(path.open("wb"), closefd=True)

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_documents(directory: Path, prefix: str) -> Iterator[Document]:
    """The documents that a `DocumentWriter` wrote, in order, one in memory at a time."""
    for path in sorted(directory.glob(f"{prefix}-*{_SUFFIX}")):
        yield from _read_file(path)


def batched_by_size(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Consecutive documents in lists of about `characters` characters; a longer document stands alone."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > characters:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch


def _read_file(path: Path) -> Iterator[Document]:
    try:
        for line in _lines(_decompressed(path)):
            record = json.loads(line)
            yield Document(record["text"], record["source"], record["part"], record["id"])
    except (zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}). Build the corpus again.") from None


def _decompressed(path: Path) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while block := file.read(_COMPRESSED_BLOCK):
            yield decompressor.decompress(block)
    if not decompressor.eof:
        raise ValueError("it ends too early")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        *lines, tail = block.split(b"\n")
        for line in lines:
            yield b"".join([*rest, line])
            rest = []
        rest.append(tail)
    if any(rest):
        raise ValueError("its last line is incomplete")
