"""Finished parts on disk: their documents, the index and signatures for later decisions, removals and accounts."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import atomic_directory, read_json
from sheepop.data.clean.account import Account, Samples
from sheepop.data.documents import Document, StoredDocument, read_stored, stored_file
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.signatures import SignatureWriter
from sheepop.data.mixing import Mixture

ACCOUNT = "account.json"
SIGNATURES = "signatures"
_PREFIX, _INDEX, _NAMES, _REMOVALS = "part", "index.bin", "names.txt", "removals"
# For each document its content id, its size in UTF-8 bytes, and the number of its mixed source, -1 for none.
_INDEX_TYPE = np.dtype([("id", "u1", 16), ("size", "<i8"), ("mixed", "<i2")])
_INDEX_ENTRY = struct.Struct("<16sqh")


class Removal(NamedTuple):
    """The removal of document number `document` of part `part`, with the stage and the reason."""

    part: int
    document: int
    stage: str
    reason: str
    detail: str


@dataclass(frozen=True)
class FinishedPart:
    """Part `number` of the pass in `directory`, with the removals that were decided later over all parts."""

    directory: Path
    number: int

    @property
    def path(self) -> Path:
        """The directory of the part."""
        return part_path(self.directory, self.number)

    def documents(self) -> Iterator[StoredDocument]:
        """Yields the documents."""
        return read_stored(self.path, _PREFIX)

    def names(self) -> list[str]:
        """The display name of each document, see `document_name`."""
        # Read as bytes: names may contain other characters that end a line in text mode.
        return (self.path / _NAMES).read_bytes().decode("utf-8").split("\n")[:-1]

    def kept_index(self) -> NDArray[np.void]:
        """The index of the documents that stay, ``(N,)``, with the fields ``id`` (16 bytes), ``size``, ``mixed``."""
        return np.delete(np.fromfile(self.path / _INDEX, _INDEX_TYPE), list(self._removals()))

    def kept(self, account: Account) -> Iterator[StoredDocument]:
        """Yields the documents that stay; records the others in `account`."""
        removals = self._removals()
        for index, stored in enumerate(self.documents()):
            if (removal := removals.get(index)) is None:
                yield stored
            else:
                account.removed(removal.stage, stored.document().draft(), removal.reason, removal.detail)

    def _removals(self) -> dict[int, Removal]:
        path = self.directory / _REMOVALS / f"{self.number:05d}.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        return {removal.document: removal for removal in (Removal(*json.loads(line)) for line in lines)}


def part_path(directory: Path, number: int) -> Path:
    """The directory of part `number` of a pass."""
    return directory / f"{number:05d}"


def finished_parts(directory: Path, count: int) -> list[FinishedPart]:
    """All parts of the pass in `directory`."""
    return [FinishedPart(directory, number) for number in range(count)]


def write_part(
    directory: Path,
    documents: Iterable[Document],
    mixture: Mixture,
    *,
    sign: bool = False,
    near: NearDuplicatesConfig | None = None,
) -> None:
    """Writes the documents of a part; with `sign` also signatures to find equal ones, with `near` also near ones."""
    with (
        (directory / _INDEX).open("wb") as index,
        (directory / _NAMES).open("w", encoding="utf-8", newline="\n") as names,
        ExitStack() as stack,
        stored_file(directory, _PREFIX) as file,
    ):
        signatures = stack.enter_context(SignatureWriter(directory / SIGNATURES, near)) if sign else None
        for document in documents:
            file.write(document.stored().line)
            number = mixture.number(document.source)
            index.write(_INDEX_ENTRY.pack(bytes.fromhex(document.id), document.num_bytes, number))
            names.write(document_name(document).replace("\n", " ") + "\n")
            if signatures is not None:
                signatures.add(document)


def document_name(document: Document) -> str:
    """The display name of a document: its file and its place there, or its number if it is not the first."""
    if document.place:
        return f"{document.source}, {document.place}"
    return f"{document.source}, document {document.part}" if document.part else document.source


def write_removals(directory: Path, removals: Iterable[Removal]) -> None:
    """Writes which documents of a pass are removed to its directory; replaces an earlier list as a whole."""
    with atomic_directory(directory / _REMOVALS, replace=True) as staging:
        for part, group in groupby(removals, lambda removal: removal.part):
            with (staging / f"{part:05d}.jsonl").open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(removal, ensure_ascii=False) + "\n" for removal in group)


def added_accounts(directories: Iterable[Path]) -> dict[str, Any]:
    """The sum of several parts' accounts, with the samples of all; raises `DataError` for a damaged account."""
    total: dict[str, Any] = {}
    kept = {name: Samples() for name in ("samples", "little")}
    for directory in directories:
        account = read_json(directory / ACCOUNT, DataError)
        for name, samples in kept.items():
            for sample in account.pop(name, ()):
                samples.offer(sample.pop("key"), sample)
        _add(total, account)
    return {**total, **{name: samples.as_record() for name, samples in kept.items()}}


def _add(total: dict[str, Any], account: dict[str, Any]) -> None:
    for key, value in account.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), value)
        else:
            total[key] = total[key] + value if key in total else value
