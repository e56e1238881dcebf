"""The decision between passes about equal and nearly equal documents, of this build and of earlier corpora."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from sheepop.core.console import Console
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.earlier_corpora import earlier_documents, earlier_files, sign_file
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.signature_files import PartSignatures
from sheepop.data.pipeline.parts import SIGNATURES, FinishedPart, document_name
from sheepop.data.pipeline.removals import PartRemoval


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
    signed = [_signed(file, number, near, directory) for number, file in enumerate(earlier)]
    signatures = [PartSignatures.open(path, near, protected=True) for path in signed]
    signatures += [PartSignatures.open(part.path / SIGNATURES, near) for part in parts]

    def read(number: int) -> Iterator[Document]:
        if number < len(earlier):
            return earlier_documents(earlier[number])
        return (stored.document() for stored in parts[number - len(earlier)].documents())

    @lru_cache(maxsize=16)
    def names(number: int) -> list[str]:
        if number < len(earlier):
            return [document_name(document) for document in earlier_documents(earlier[number])]
        return parts[number - len(earlier)].names()

    found = find_duplicates(
        signatures, read, near, directory / "deciding", exact="exact_duplicates" in decided, console=console
    )
    for removed in found:
        stage = "exact_duplicates" if removed.reason == "exact" else "near_duplicates"
        what = "an equal document" if removed.reason == "exact" else f"{removed.similarity:.2f} like"
        detail = f"{what}: {names(removed.kept_part)[removed.kept_index]}"
        yield PartRemoval(removed.part - len(earlier), removed.index, stage, f"{removed.reason} copy", detail)


def _signed(file: Path, number: int, near: NearDuplicatesConfig | None, directory: Path) -> Path:
    target = directory / "earlier" / f"{number:05d}"
    target.parent.mkdir(exist_ok=True)
    sign_file(file, target, near)
    return target
