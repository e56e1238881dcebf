"""Finished corpora that a build is compared with: their documents are known and must not come again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from sheepop.core.errors import DataError
from sheepop.data.corpus import DOCUMENTS
from sheepop.data.documents import Document, read_documents_file
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.signature_files import SignatureWriter
from sheepop.data.manifest import read_manifest
from sheepop.data.shards import FILE_PREFIX


def earlier_files(corpora: Iterable[str | Path]) -> list[Path]:
    """The document files of finished corpora: corpus by corpus, split by split, in order.

    Each file is one part to compare with. Raises `DataError` when a directory is not a corpus that can be read.
    """
    files: list[Path] = []
    for directory in map(Path, corpora):
        read_manifest(directory)
        for prefix in FILE_PREFIX.values():
            files += sorted((directory / DOCUMENTS).glob(f"{prefix}-*.jsonl.zst"))
    return files


def sign_file(file: Path, target: Path, config: NearDuplicatesConfig | None) -> None:
    """Writes the signatures of a corpus's document file to `target`, whole or not at all.

    Raises `DataError` when the file is damaged.
    """
    with SignatureWriter(target, config) as writer:
        for document in earlier_documents(file):
            try:
                writer.add(document)
            except ValueError as error:
                raise DataError(f"{file} is damaged ({error}). Build that corpus again.") from None


def earlier_documents(file: Path) -> Iterator[Document]:
    """The documents of a corpus's document file, one at a time."""
    return read_documents_file(file)
