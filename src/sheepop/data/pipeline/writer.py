"""The last step of a pass over documents: the part on disk, whole or absent."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import datatrove.data as datatrove
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from sheepop.core.errors import SheepOpError
from sheepop.core.files import atomic_directory, write_json
from sheepop.data.clean.ledger import Ledger
from sheepop.data.documents import Document, DocumentWriter
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.mixing import MixedSource, Mixture
from sheepop.data.pipeline.parts import ACCOUNT, PREFIX, PartArrays, part_path

FAILURES = "failures"
# Here, where every worker passes: progress and errors are reported by this package, not by datatrove's log.
logger.disable("datatrove")


class PartWriter(PipelineStep):
    """Writes the documents it is given as part `rank` below `directory`, with what later passes need.

    With `sign` what equal documents are found by is written too, and with `near` what nearly equal ones are found by.
    Documents are handed on, so that a step may follow.
    """

    type = "write"
    name = "part"

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        mix: tuple[MixedSource, ...] = (),
        *,
        sign: bool = False,
        near: NearDuplicatesConfig | None = None,
    ) -> None:
        super().__init__()
        self.ledger, self.directory, self.mix = ledger, directory, mix
        self.sign, self.near = sign, near

    def run(
        self, data: Iterable[datatrove.Document], rank: int = 0, world_size: int = 1
    ) -> Iterator[datatrove.Document]:
        """The documents, in order, each written before it is handed on."""
        mixture = Mixture(self.mix)
        with whole_part(self.directory, rank) as staging:
            self.ledger.begin(staging)
            documents = num_bytes = 0
            with (
                closing(self.ledger),
                closing(PartArrays(staging, sign=self.sign, near=self.near)) as arrays,
                DocumentWriter(staging, PREFIX) as writer,
            ):
                for item in data:
                    document = to_stored(item)
                    line = document.stored()
                    writer.write(line)
                    arrays.add(document, mixture.number(document.source))
                    documents += 1
                    num_bytes += document.num_bytes
                    yield item
            written = {"documents": documents, "bytes": num_bytes}
            write_json(staging / ACCOUNT, {**self.ledger.as_record(), "written": written})


def to_stored(item: datatrove.Document) -> Document:
    """A document of the pipeline as it is kept."""
    about = item.metadata
    return Document.of(
        item.text,
        about["source"],
        about["part"],
        kind=about["kind"],
        language=about["language"],
        place=about["place"],
        marks=tuple((offset, name) for offset, name in about["marks"]),
        facts=about["facts"],
    )


def to_pipeline(document: Document) -> datatrove.Document:
    """A kept document as the steps of a pass take it."""
    metadata: dict[str, Any] = {
        "source": document.source,
        "part": document.part,
        "kind": document.kind,
        "language": document.language,
        "place": document.place,
        "marks": list(document.marks),
        "facts": dict(document.facts),
    }
    return datatrove.Document(text=document.text, id=f"{document.source}#{document.part}", metadata=metadata)


@contextmanager
def whole_part(directory: Path, rank: int) -> Iterator[Path]:
    """The directory of part `rank`, filled in the block, whole or absent; what stops it is written down for the parent.

    An engine may run this on another machine, where nobody sees the error.
    """
    failure = directory / FAILURES / f"{rank:05d}.json"
    failure.unlink(missing_ok=True)
    try:
        with atomic_directory(part_path(directory, rank), replace=True) as staging:
            yield staging
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, SheepOpError) else ""
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_json(failure, {"type": kind, "message": str(error), "traceback": traceback.format_exc()})
        raise


Work = Callable[[int, Path], None]


class PartWork(PipelineStep):
    """A step that is a whole task by itself: `work(rank, staging)` fills the part's directory."""

    type = "work"

    def __init__(self, name: str, directory: Path, work: Work) -> None:
        self.name = name
        super().__init__()
        self.directory, self.work = directory, work

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[datatrove.Document]:
        """Does the work of part `rank`; there are no documents to hand on."""
        with whole_part(self.directory, rank) as staging:
            self.work(rank, staging)
        yield from ()
