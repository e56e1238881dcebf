"""The order of work between the plan of a build and its documents: passes over parts, decisions between them.

Stages that look at one document at a time run together in one pass. A stage that looks at all documents ends the pass
before it: the pass leaves what the decision needs, the decision says which documents go, and the next pass applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.console import Console
from sheepop.core.files import write_json
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stages import local_stages
from sheepop.data.config import DataConfig
from sheepop.data.mixing import Mixture
from sheepop.data.pipeline.account import Account
from sheepop.data.pipeline.engine import Engine, run_pass
from sheepop.data.pipeline.inventory import Plan
from sheepop.data.pipeline.parts import ACCOUNT, FinishedPart, part_path, write_part
from sheepop.data.pipeline.removals import decide_duplicates, write_removals
from sheepop.data.pipeline.source import Earlier, Inputs, Source, SourceSettings

GLOBAL_STAGES = ("exact_duplicates", "near_duplicates")


@dataclass(frozen=True)
class Cleaned:
    """The last pass over documents: its parts, and which of their documents a decision after it removes."""

    directory: Path
    removals: Path | None
    parts: tuple[FinishedPart, ...]


def split_into_passes(stages: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The stages in passes: those of one document at a time, then those of all documents that follow them at once."""
    passes: list[tuple[list[str], list[str]]] = [([], [])]
    for name in stages:
        local, decided = passes[-1]
        if name in GLOBAL_STAGES:
            decided.append(name)
        elif decided:
            passes.append(([name], []))
        else:
            local.append(name)
    return passes


@dataclass(frozen=True)
class CleanPart:
    """Work on a part: its documents from `source`, through the stages `local`, to disk with what `decided` need."""

    source: Source
    config: DataConfig
    local: Sequence[str]
    decided: Sequence[str]
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes the documents and the account of what became of all others."""
        ledger = Ledger(self.seed)
        ledger.begin(staging)
        with closing(ledger):
            documents = self.source.documents(rank, ledger)
            for stage in local_stages(self.config.clean, self.local, ledger, self.seed):
                documents = stage.run(documents)
            finished, mixture = (draft.finished() for draft in documents), Mixture(self.config.mix)
            near = self.config.clean.near_duplicates if "near_duplicates" in self.decided else None
            written = write_part(staging, finished, mixture, sign=bool(self.decided), near=near)
        write_json(staging / ACCOUNT, {**ledger.as_record(), "written": written})


def clean_documents(
    plan: Plan,
    config: DataConfig,
    settings: SourceSettings,
    seed: int,
    engine: Engine,
    account: Account,
    console: Console,
) -> Cleaned:
    """Runs every pass; adds what became of the documents to `account`."""
    source: Source = Inputs(plan.directory, settings)
    sizes = [max(part.size, 1) / 1e6 for part in plan.parts]
    for number, (local, decided) in enumerate(split_into_passes(config.clean.stages)):
        directory = plan.directory / f"pass-{number}"
        work = CleanPart(source, config, local, decided, seed)
        run_pass(engine, directory, work, sizes, console, "Cleaning" if number else "Reading and cleaning")
        parts = tuple(FinishedPart(part_path(directory, rank)) for rank in range(len(plan.parts)))
        for part in parts:
            account.add(part.account())
        removals = _decide(parts, decided, config, directory, console)
        source = Earlier(directory, removals)
    return Cleaned(directory, removals, parts)


def _decide(
    parts: Sequence[FinishedPart], decided: Sequence[str], config: DataConfig, target: Path, console: Console
) -> Path | None:
    if not decided:
        return None
    removals = target / "removals"
    write_removals(removals, decide_duplicates(parts, decided, config.clean.near_duplicates, target, console))
    return removals
