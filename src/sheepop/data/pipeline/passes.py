"""The order of work between the plan of a build and its documents: passes over parts, decisions between them.

Stages that look at one document at a time run together in one pass. A stage that looks at all documents ends the pass
before it: the pass leaves what the decision needs, the decision says which documents go, and the next pass applies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sheepop.core.console import Console
from sheepop.core.files import write_json
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stages import local_stages
from sheepop.data.config import DataConfig
from sheepop.data.documents import Document, Draft
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.earlier_corpora import earlier_documents, earlier_files, sign_file
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.signature_files import PartSignatures
from sheepop.data.mixing import Mixture
from sheepop.data.pipeline.engine import Engine, run_pass
from sheepop.data.pipeline.parts import (
    ACCOUNT,
    SIGNATURES,
    FinishedPart,
    Removal,
    document_name,
    finished_parts,
    write_part,
    write_removals,
)
from sheepop.data.pipeline.source import read_inputs
from sheepop.data.pipeline.workplace import Plan, Query

_GLOBAL_STAGES = ("exact_duplicates", "near_duplicates")


def split_into_passes(stages: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The stages in passes: those of one document at a time, then those of all documents that follow them at once."""
    passes: list[tuple[list[str], list[str]]] = [([], [])]
    for name in stages:
        if name in _GLOBAL_STAGES:
            passes[-1][1].append(name)
        elif passes[-1][1]:
            passes.append(([name], []))
        else:
            passes[-1][0].append(name)
    return passes


@dataclass(frozen=True)
class CleanPart:
    """Work on a part: its documents through the stages `local`, to disk with what the stages `decided` need.

    They come from the inputs of the plan, or are what the pass in `earlier` left.
    """

    plan: Plan
    query: Query | None
    earlier: Path | None
    config: DataConfig
    local: Sequence[str]
    decided: Sequence[str]
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes the documents and the account of what became of all others."""
        clean, ledger = self.config.clean, Ledger(self.seed)
        ledger.begin(staging)
        with closing(ledger):
            documents = self._documents(rank, ledger)
            for stage in local_stages(clean, self.local, ledger, self.seed):
                documents = stage.run(documents)
            finished, mixture = (draft.finished() for draft in documents), Mixture(self.config.mix)
            near = clean.near_duplicates if "near_duplicates" in self.decided else None
            write_part(staging, finished, mixture, sign=bool(self.decided), near=near)
        write_json(staging / ACCOUNT, ledger.as_record())

    def _documents(self, rank: int, ledger: Ledger) -> Iterator[Draft]:
        if self.earlier is None:
            return read_inputs(self.plan, rank, self.config, self.query, ledger)
        return (stored.document().draft() for stored in FinishedPart(self.earlier, rank).kept(ledger))


def clean_documents(
    plan: Plan, config: DataConfig, query: Query | None, seed: int, engine: Engine, console: Console
) -> list[Path]:
    """Runs every pass; returns their directories, of which the last has the documents."""
    directories: list[Path] = []
    for number, (local, decided) in enumerate(split_into_passes(config.clean.stages)):
        directory = plan.directory / f"pass-{number}"
        work = CleanPart(plan, query, directories[-1] if number else None, config, local, decided, seed)
        what = "Cleaning" if number else "Reading and cleaning"
        run_pass(engine, directory, work, plan.megabytes, console, what)
        if decided:
            parts = finished_parts(directory, len(plan.parts))
            write_removals(directory, _decide(parts, decided, config.clean.near_duplicates, directory, console))
        directories.append(directory)
    return directories


def _decide(
    parts: Sequence[FinishedPart],
    decided: Sequence[str],
    config: NearDuplicatesConfig,
    directory: Path,
    console: Console,
) -> Iterator[Removal]:
    """Which documents of `parts` go by the stages `decided`; those of ``config.against`` only make others go."""
    near = config if "near_duplicates" in decided else None
    earlier = earlier_files(config.against)
    signatures = []
    for number, file in enumerate(earlier):
        target = directory / "earlier" / f"{number:05d}"
        target.parent.mkdir(exist_ok=True)
        sign_file(file, target, near)
        signatures.append(PartSignatures.open(target, near, protected=True))
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

    exact = "exact_duplicates" in decided
    for removed in find_duplicates(signatures, read, near, directory / "deciding", exact=exact, console=console):
        what = "an equal document" if removed.reason == "exact" else f"{removed.similarity:.2f} like"
        detail = f"{what}: {names(removed.kept_part)[removed.kept_index]}"
        stage, reason = f"{removed.reason}_duplicates", f"{removed.reason} copy"
        yield Removal(removed.part - len(earlier), removed.index, stage, reason, detail)
