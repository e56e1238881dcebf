"""Finished parts on disk: documents with the arrays that later passes decide by, and the part's account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import read_json
from sheepop.data.documents import Document, DocumentWriter, StoredDocument, read_stored
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.signature_files import SignatureWriter
from sheepop.data.mixing import Mixture

PREFIX = "part"
ACCOUNT = "account.json"
SIGNATURES = "signatures"
_ID_BYTES = 16
_SIZE_TYPE = np.dtype("<i8")


def part_path(directory: Path, number: int) -> Path:
    """Where part `number` of a pass stands."""
    return directory / f"{number:05d}"


@dataclass(frozen=True)
class FinishedPart:
    """One part that a pass wrote: its documents in order, and for each its id and its size in bytes."""

    path: Path

    def documents(self) -> Iterator[StoredDocument]:
        """The documents, one in memory at a time."""
        return read_stored(self.path, PREFIX)

    def ids(self) -> NDArray[np.uint8]:
        """Content ids, ``(N, 16)``."""
        return np.fromfile(self.path / "ids.bin", np.uint8).reshape(-1, _ID_BYTES)

    def sizes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each document, ``(N,)``."""
        return np.fromfile(self.path / "sizes.bin", _SIZE_TYPE)

    def names(self) -> list[str]:
        """What each document is called in words: its file, and its number there when it is not the first."""
        # Not as text: names may hold other characters that would end a line there.
        return (self.path / "names.txt").read_bytes().decode("utf-8").split("\n")[:-1]

    def mixed(self) -> NDArray[np.int16]:
        """The number of the mixed source that each document belongs to, ``(N,)``; -1 for none."""
        return np.fromfile(self.path / "mixed.bin", np.int16)

    def account(self) -> dict[str, Any]:
        """What became of the part's input."""
        record: dict[str, Any] = read_json(self.path / ACCOUNT, DataError)
        return record


def write_part(
    directory: Path,
    documents: Iterable[Document],
    mixture: Mixture,
    *,
    sign: bool = False,
    near: NearDuplicatesConfig | None = None,
) -> dict[str, int]:
    """Writes the documents of a part with their arrays; the number of documents and of bytes.

    With `sign` what equal documents are found by is written too, and with `near` what nearly equal ones are found by.
    """
    num_documents = num_bytes = 0
    with (
        (directory / "ids.bin").open("wb") as ids,
        (directory / "sizes.bin").open("wb") as sizes,
        (directory / "mixed.bin").open("wb") as mixed,
        (directory / "names.txt").open("w", encoding="utf-8", newline="\n") as names,
        ExitStack() as stack,
        DocumentWriter(directory, PREFIX) as writer,
    ):
        signatures = stack.enter_context(SignatureWriter(directory / SIGNATURES, near)) if sign else None
        for document in documents:
            writer.write(document.stored())
            ids.write(bytes.fromhex(document.id))
            sizes.write(np.int64(document.num_bytes).astype(_SIZE_TYPE).tobytes())
            mixed.write(np.int16(mixture.number(document.source)).tobytes())
            names.write(document_name(document).replace("\n", " ") + "\n")
            if signatures is not None:
                signatures.add(document)
            num_documents += 1
            num_bytes += document.num_bytes
    return {"documents": num_documents, "bytes": num_bytes}


def document_name(document: Document) -> str:
    """What a document is called in words: its file, its place there, or else its number when it is not the first."""
    if document.place:
        return f"{document.source}, {document.place}"
    return f"{document.source}, document {document.part}" if document.part else document.source
