"""Documents that a look at all documents removed: decided after a pass, applied by the next one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.core.files import atomic_directory
from sheepop.data.corpus import DOCUMENTS
from sheepop.data.documents import Document, read_documents_file
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.signature_files import PartSignatures, SignatureWriter
from sheepop.data.manifest import read_manifest
from sheepop.data.pipeline.parts import SIGNATURES, FinishedPart, document_name
from sheepop.data.shards import FILE_PREFIX


@dataclass(frozen=True, slots=True)
class PartRemoval:
    """The document `index` of part `part` goes, by a stage of the configuration, for a reason."""

    part: int
    index: int
    stage: str
    reason: str
    detail: str


def write_removals(directory: Path, removals: Iterable[PartRemoval]) -> None:
    """Writes one file per part that loses documents; `directory` is replaced as a whole."""
    with atomic_directory(directory, replace=True) as staging:
        for removal in removals:
            with (staging / f"{removal.part:05d}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(removal), ensure_ascii=False) + "\n")


def read_removals(directory: Path | None, part: int) -> dict[int, PartRemoval]:
    """What was decided about the documents of a part, by index; nothing without a directory."""
    path = directory / f"{part:05d}.jsonl" if directory is not None else None
    if path is None or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as file:
        removals = (PartRemoval(**json.loads(line)) for line in file)
        return {removal.index: removal for removal in removals}


def kept_masks(parts: Iterable[FinishedPart], directory: Path | None) -> Iterator[NDArray[np.bool_]]:
    """For each part, in order, which of its documents stay."""
    for number, part in enumerate(parts):
        mask = np.ones(len(part.sizes()), dtype=bool)
        mask[list(read_removals(directory, number))] = False
        yield mask


def decide_duplicates(
    parts: Sequence[FinishedPart],
    decided: Sequence[str],
    config: NearDuplicatesConfig,
    directory: Path,
    console: Console,
) -> Iterator[PartRemoval]:
    """Which documents of `parts` go by the stages `decided`; those of ``config.against`` only make others go."""
    near = config if "near_duplicates" in decided else None
    earlier = earlier_files(config.against)
    signed = directory / "earlier"
    signed.mkdir(exist_ok=True)
    signatures = [sign_file(file, signed / f"{number:05d}", near) for number, file in enumerate(earlier)]
    signatures += [PartSignatures.open(part.path / SIGNATURES, near) for part in parts]

    def read(number: int) -> Iterator[Document]:
        if number < len(earlier):
            return read_documents_file(earlier[number])
        return (stored.document() for stored in parts[number - len(earlier)].documents())

    @lru_cache(maxsize=16)
    def names(number: int) -> list[str]:
        if number < len(earlier):
            return [document_name(document) for document in read_documents_file(earlier[number])]
        return parts[number - len(earlier)].names()

    found = find_duplicates(
        signatures, read, near, directory / "deciding", exact="exact_duplicates" in decided, console=console
    )
    for removed in found:
        stage = "exact_duplicates" if removed.reason == "exact" else "near_duplicates"
        what = "an equal document" if removed.reason == "exact" else f"{removed.similarity:.2f} like"
        detail = f"{what}: {names(removed.kept_part)[removed.kept_index]}"
        yield PartRemoval(removed.part - len(earlier), removed.index, stage, f"{removed.reason} copy", detail)


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


def sign_file(file: Path, target: Path, near: NearDuplicatesConfig | None) -> PartSignatures:
    """The signatures of a corpus's document file, written to `target`; raises `DataError` for a damaged file."""
    with SignatureWriter(target, near) as writer:
        for document in read_documents_file(file):
            try:
                writer.add(document)
            except ValueError as error:
                raise DataError(f"{file} is damaged ({error}). Build that corpus again.") from None
    return PartSignatures.open(target, near, protected=True)
