"""The directory in which a corpus is built: it outlives a build that is stopped, so that the next one goes on."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError
from sheepop.core.files import read_json, remove_tree, storage_errors, write_json
from sheepop.core.locks import exclusive_lock
from sheepop.data.config import DataConfig
from sheepop.data.discovery import FoundFile, Skipped, discover
from sheepop.data.extract.git import GIT_PREFIX, repository_entries
from sheepop.data.pipeline.inventory import INVENTORY, PLAN, Entry, Plan, Query, read_plan, write_plan

DISCOVERED = "discovered.jsonl"
_LOCK, _NEXT, _SECONDS = "lock", "next", "seconds.json"
_EACH_SECONDS = 1.0
# Of every byte of text: compressed documents twice, the shuffle's plain copy, tokens twice, checked against builds.
_ROOM = 2.5
_SHOWN_FROM_BYTES = 10**8


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


def find_inputs(
    config: DataConfig, query: Query | None, leave_out: tuple[Path, ...] = ()
) -> Iterator[FoundFile | Skipped | Entry]:
    """Every input in a fixed order: the files below the plain paths, then repositories, then the query.

    The directories `leave_out` are not read even when they lie below an input. Raises `DataError` for a path that
    does not exist and for a repository or revision that git does not know.
    """
    plain = [path for path in config.paths if not path.startswith(GIT_PREFIX)]
    if plain:
        yield from discover(plain, max_file_bytes=config.max_file_bytes, ignore=config.ignore, leave_out=leave_out)
    for path in config.paths:
        if path.startswith(GIT_PREFIX):
            yield from repository_entries(path, max_file_bytes=config.max_file_bytes, ignore=config.ignore)
    if query is not None:
        from sheepop.data.extract.query import source_label

        yield Entry("query", "", f"{source_label(query.url)}: {query.text}", 0)


def take_inventory(
    workplace: Path, items: Iterable[FoundFile | Skipped | Entry], settings: Any, found: Found
) -> tuple[Plan, bool]:
    """Lists the inputs and cuts them into parts; returns the plan, and whether a stopped build of it is here.

    What a build with another plan left is removed. Raises `StorageError` where the workplace cannot be written.
    """
    before = _fingerprint(workplace)
    coming = workplace / _NEXT
    with storage_errors(workplace):
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


def announce(plan: Plan, found: Found, num_workers: int, workplace: Path, console: Console) -> None:
    """Says what will be read, about how long it takes and what room it needs; warns when there is less."""
    room = int(found.num_bytes * _ROOM)
    free = shutil.disk_usage(workplace).free
    if found.num_bytes >= _SHOWN_FROM_BYTES:
        console.info(
            f"{found.num_bytes / 1e6:,.0f} MB in {sum(part.entries for part in plan.parts):,} inputs: about "
            f"{_in_words(plan.seconds / max(1, num_workers))} and {room / 1e9:,.1f} GB of room, most of it until the "
            f"build is done ({free / 1e9:,.1f} GB is free)."
        )
    if room > free:
        console.warn(
            f"{workplace.parent} has {free / 1e9:,.1f} GB free, and the build may need {room / 1e9:,.1f} GB. If it "
            "fills up, free some space and run the same command again: it continues from what is done."
        )


class StageTimes:
    """Seconds of every stage over all runs of a build: kept in its workplace, so that a kill loses one of them."""

    def __init__(self, workplace: Path) -> None:
        self._path = workplace / _SECONDS
        self.seconds: dict[str, float] = read_json(self._path, DataError) if self._path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes."""
        before, started, ended = self.seconds.get(name, 0.0), time.monotonic(), threading.Event()

        def note() -> None:
            self.seconds[name] = round(before + time.monotonic() - started, 3)
            write_json(self._path, self.seconds)

        def watch() -> None:
            while not ended.wait(_EACH_SECONDS):
                with suppress(StorageError):  # the work itself will say that the disk is full
                    note()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            note()


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60):,} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


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
