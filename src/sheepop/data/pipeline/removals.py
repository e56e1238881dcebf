"""Documents that a look at all documents removed: decided after a pass, applied by the next one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.files import atomic_directory
from sheepop.data.pipeline.parts import FinishedPart


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
