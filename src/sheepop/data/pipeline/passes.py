"""The order of work between the plan of a build and its documents: passes over parts, decisions between them.

Stages that look at one document at a time run together in one pass. A stage that looks at all documents ends the pass
before it: the pass leaves what the decision needs, the decision says which documents go, and the next pass applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from sheepop.core.console import Console
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stages import local_stages
from sheepop.data.config import DataConfig
from sheepop.data.pipeline.account import Account
from sheepop.data.pipeline.engine import Engine, run_pass
from sheepop.data.pipeline.finding_duplicates import decide_duplicates
from sheepop.data.pipeline.inventory import Plan
from sheepop.data.pipeline.parts import FinishedPart, part_path
from sheepop.data.pipeline.reader import PartReader
from sheepop.data.pipeline.removals import write_removals
from sheepop.data.pipeline.source import PartSource, SourceSettings
from sheepop.data.pipeline.writer import PartWriter

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


def clean_documents(
    plan: Plan,
    config: DataConfig,
    source: SourceSettings,
    seed: int,
    engine: Engine,
    account: Account,
    console: Console,
) -> Cleaned:
    """Runs every pass; adds what became of the documents to `account`."""
    directory, removals = plan.directory, None
    sizes = [max(part.size, 1) / 1e6 for part in plan.parts]
    for number, (local, decided) in enumerate(split_into_passes(config.clean.stages)):
        ledger = Ledger(seed)
        target = plan.directory / f"pass-{number}"
        first: PipelineStep
        is_first = number == 0
        first = PartSource(ledger, plan.directory, source) if is_first else PartReader(ledger, directory, removals)
        near = config.clean.near_duplicates if "near_duplicates" in decided else None
        writer = PartWriter(ledger, target, config.mix, sign=bool(decided), near=near)
        steps = [first, *local_stages(config.clean, local, ledger, seed), writer]
        words = "Reading and cleaning" if is_first else "Cleaning"
        run_pass(engine, target, steps, sizes, console, words)
        directory = target
        parts = tuple(FinishedPart(part_path(directory, rank)) for rank in range(len(plan.parts)))
        for part in parts:
            account.add(part.account())
        removals = _decide(parts, decided, config, target, console)
    return Cleaned(directory, removals, parts)


def _decide(
    parts: Sequence[FinishedPart], decided: Sequence[str], config: DataConfig, target: Path, console: Console
) -> Path | None:
    if not decided:
        return None
    removals = target / "removals"
    write_removals(removals, decide_duplicates(parts, decided, config.clean.near_duplicates, target, console))
    return removals


def quarantined(parts: Iterable[FinishedPart]) -> Iterator[bytes]:
    """The lines about inputs that could not be used, part by part."""
    for part in parts:
        yield (part.path / "quarantine.jsonl").read_bytes()
