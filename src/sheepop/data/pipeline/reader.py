"""The first step of a later pass: the documents of a finished part, without those that are to go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datatrove.data as datatrove
from datatrove.pipeline.base import PipelineStep

from sheepop.data.clean.ledger import Ledger
from sheepop.data.pipeline.parts import FinishedPart, part_path
from sheepop.data.pipeline.removals import read_removals
from sheepop.data.pipeline.writer import to_pipeline


class PartReader(PipelineStep):
    """Yields the documents of part `rank` of the pass before; `removals` says which of them go, and why."""

    type = "read"
    name = "part"

    def __init__(self, ledger: Ledger, directory: Path, removals: Path | None) -> None:
        super().__init__()
        self.ledger, self.directory, self.removals = ledger, directory, removals

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[datatrove.Document]:
        """The documents that stay, in order."""
        removals = read_removals(self.removals, rank)
        for index, stored in enumerate(FinishedPart(part_path(self.directory, rank)).documents()):
            document = to_pipeline(stored.document())
            removal = removals.get(index)
            if removal is None:
                yield document
            else:
                self.ledger.removed(removal.stage, document, removal.reason, removal.detail)
