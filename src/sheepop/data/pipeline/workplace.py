"""The directory in which a corpus is built: it outlives a build that is stopped, so that the next one goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, remove_tree, storage_errors
from sheepop.core.locks import exclusive_lock
from sheepop.data.discovery import FoundFile, Skipped
from sheepop.data.pipeline.inventory import INVENTORY, PLAN, Entry, Plan, read_plan, write_plan

DISCOVERED = "discovered.jsonl"
_LOCK, _NEXT = "lock", "next"


@dataclass
class Found:
    """What was found: files and folders, those left out counted by reason."""

    files: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    folders_skipped: Counter[str] = field(default_factory=Counter)


def workplace_of(output: Path) -> Path:
    """Where `output` is built: a hidden directory beside it."""
    return output.with_name(f".{output.name}.building")


@contextmanager
def locked_workplace(output: Path) -> Iterator[Path]:
    """The workplace of `output`, held by this process alone; raises `DataError` when another build holds it.

    It stays when there are finished parts in it, with which the next build goes on.
    """
    path = workplace_of(output)
    with storage_errors(output):
        path.mkdir(parents=True, exist_ok=True)
    refusal = DataError(
        f"Another process is building {output} right now. Wait for it, or choose another output directory."
    )
    with exclusive_lock(path / _LOCK, refusal):
        try:
            yield path
        finally:
            if not any(path.glob("pass-*/[0-9]*")):
                remove_tree(path)


def take_inventory(
    workplace: Path, items: Iterable[FoundFile | Skipped | Entry], settings: Any, found: Found
) -> tuple[Plan, bool]:
    """Lists the inputs and cuts them into parts; returns the plan, and whether a stopped build of it is here.

    What a build with another plan left is removed.
    """
    before = _fingerprint(workplace)
    coming = workplace / _NEXT
    remove_tree(coming)
    coming.mkdir()
    with (coming / DISCOVERED).open("w", encoding="utf-8", newline="\n") as quarantine:
        plan = write_plan(coming, _entries(items, found, quarantine), settings)
    same = plan.fingerprint == before
    if not same:
        clear(workplace, keep=_NEXT)
    for name in (INVENTORY, DISCOVERED, PLAN):
        (coming / name).replace(workplace / name)
    coming.rmdir()
    read_plan.cache_clear()
    return Plan(workplace, plan.fingerprint, plan.parts), same


def clear(workplace: Path, *, keep: str = "") -> None:
    """Empties the workplace, the lock apart."""
    for entry in workplace.iterdir():
        if entry.name not in (_LOCK, keep):
            remove_tree(entry)


def _fingerprint(workplace: Path) -> str | None:
    path = workplace / PLAN
    try:
        return str(read_json(path, DataError)["fingerprint"]) if path.is_file() else None
    except (DataError, KeyError, TypeError):
        return None


def _entries(items: Iterable[FoundFile | Skipped | Entry], found: Found, quarantine: Any) -> Iterator[Entry]:
    for item in items:
        if isinstance(item, Skipped):
            (found.folders_skipped if item.is_directory else found.skipped)[item.reason] += 1
            found.files += not item.is_directory
            quarantine.write(json.dumps(item.as_record(), ensure_ascii=False) + "\n")
            continue
        found.files += 1
        found.num_bytes += item.size
        if isinstance(item, Entry):
            yield item
        else:
            yield Entry("file", item.path, item.source, item.size, item.modified_ns)
