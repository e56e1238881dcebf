"""The directory in which a corpus is built; it survives a stopped build, so that the next one resumes.

A file there lists the inputs, one per line, in parts that depend only on the input and take about equally long.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_file, discard_tree, read_json, remove_tree, storage_errors, write_json
from sheepop.core.locks import exclusive_lock
from sheepop.data.config import DataConfig
from sheepop.data.discovery import Entry, Skipped, discover
from sheepop.data.extract.git import GIT_PREFIX, repository_entries
from sheepop.data.extract.interface import Span
from sheepop.report.formatting import data_size

DISCOVERED = "discovered.jsonl"
_INVENTORY, _PLAN, _LOCK, _SECONDS = "inventory.jsonl", "plan.json", "lock", "seconds.json"
_EACH_SECONDS = 1.0
_MOST_PARTS = 256
# Seconds of work in a part: enough to be worth a task, and few enough that a kill does not lose much.
_SHORTEST_PART, _LONGEST_PART = 0.8, 100.0
# A file that is shorter than so many parts is read as a whole.
_LEAST_SPANS = 2
_MOST_FILES = 2000
# Megabytes of file that one process handles per second, from reading to tokens (bench/data_speed.py).
_SPEEDS = {
    **dict.fromkeys((".pdf",), 1.0),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".warc", ".epub"), 0.8),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".heic", ".avif"), 0.05),
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".xlsb", ".xls", ".odt", ".odp", ".ods", ".doc", ".ppt"), 0.5),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz", ".parquet"), 0.8),
}
_TEXT_SPEED = 2.5
# Bytes on disk per byte of text: compressed documents twice, the uncompressed copy of the shuffle, and tokens twice;
# compared with real builds.
_ROOM = 2.5
_SHOWN_FROM_BYTES = 10**8


Cut = Callable[[Entry, int], list[Span]]
"""Returns the spans of about so many bytes in which a file is to be read; none to read it as a whole."""


@dataclass(frozen=True)
class Query:
    """A database query, and the database address, which may contain a password and is never shown."""

    url: str = field(repr=False)
    text: str


@dataclass(slots=True)
class InputPart:
    """Consecutive lines of the inventory: their offset in the file, their number, bytes and estimated seconds.

    With a `span`, it is that part of the file on the one line.
    """

    offset: int
    entries: int = 0
    size: int = 0
    seconds: float = 0.0
    span: Span | None = None


@dataclass
class Inventory:
    """The inputs of a build, cut into parts, counts of what was found and skipped, and a `fingerprint` of it all."""

    directory: Path
    fingerprint: str = ""
    parts: list[InputPart] = field(default_factory=list)
    files: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    folders_skipped: Counter[str] = field(default_factory=Counter)

    @property
    def megabytes(self) -> list[float]:
        """The size of each part, for the progress bar."""
        return [max(part.size, 1) / 1e6 for part in self.parts]

    def entries(self, number: int) -> Iterator[Entry]:
        """Yields the inputs of a part, in order."""
        part = self.parts[number]
        with (self.directory / _INVENTORY).open("rb") as file:
            file.seek(part.offset)
            for _ in range(part.entries):
                entry = _entry(file.readline())
                yield entry if part.span is None else replace(entry, size=part.size, span=part.span)


def _entry(line: bytes) -> Entry:
    record = json.loads(line)
    return Entry(**{**record, "facts": tuple((k, v) for k, v in record["facts"])})


@contextmanager
def locked_workplace(output: Path) -> Iterator[Path]:
    """Locks a hidden directory beside `output`, or raises `DataError`; finished parts stay there for the next build."""
    path = output.with_name(f".{output.name}.building")
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
                clear(path)
                remove_tree(path)


def clear(workplace: Path, *keep: str) -> None:
    """Empties the workplace except for the lock and the names in `keep`.

    Workers of a killed build may live on for some seconds, and cannot write there any more.
    """
    for entry in workplace.iterdir():
        if entry.name not in (_LOCK, *keep):
            discard_tree(entry)


def find_inputs(config: DataConfig, query: Query | None, leave_out: tuple[Path, ...] = ()) -> Iterator[Entry | Skipped]:
    """Yields every input in order: files except `leave_out`, repositories, query; `DataError` if one is missing."""
    plain = [path for path in config.paths if not path.startswith(GIT_PREFIX)]
    if plain:
        yield from discover(
            plain,
            max_file_bytes=config.max_file_bytes,
            ignore=config.ignore,
            leave_out=leave_out,
            follow_links=config.follow_links,
        )
    for path in config.paths:
        if path.startswith(GIT_PREFIX):
            yield from repository_entries(path, max_file_bytes=config.max_file_bytes, ignore=config.ignore)
    if query is not None:
        from sheepop.data.extract.query import source_label

        yield Entry("query", "", f"{source_label(query.url)}: {query.text}", 0)


def take_inventory(
    workplace: Path, items: Iterable[Entry | Skipped], settings: Any, cut: Cut = lambda *_: []
) -> tuple[Inventory, bool]:
    """Lists the inputs and cuts them into parts; returns them, and whether a stopped build of them can be resumed.

    `settings` (JSON) is everything else that determines the result; `cut` finds the spans of a large file. Removes the
    files of another build.
    """
    inventory = Inventory(workplace)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8"))
    listed: list[tuple[InputPart, bool]] = []
    with (
        atomic_file(workplace / _INVENTORY, replace=True) as listing,
        atomic_file(workplace / DISCOVERED, replace=True) as discovered,
        storage_errors(workplace),
        listing.open("wb") as file,
        discovered.open("w", encoding="utf-8", newline="\n") as quarantine,
    ):
        for item in items:
            if isinstance(item, Skipped):
                (inventory.folders_skipped if item.is_directory else inventory.skipped)[item.reason] += 1
                inventory.files += not item.is_directory
                quarantine.write(json.dumps(item.as_record(), ensure_ascii=False) + "\n")
                continue
            inventory.files += 1
            inventory.num_bytes += item.size
            # Names may contain bytes that are not UTF-8; ASCII escapes preserve them in JSON.
            line = json.dumps(asdict(item)).encode("ascii") + b"\n"
            digest.update(line)
            speed = _SPEEDS.get(PurePath(item.source).suffix.lower(), _TEXT_SPEED)
            listed.append((InputPart(file.tell(), 1, item.size, item.size / 1e6 / speed), item.type == "query"))
            file.write(line)
    inventory.parts = _joined(list(_cut(listed, workplace / _INVENTORY, cut)), _longest_part(listed))
    # How a file is cut depends on its content, and in hostile files on the limits of memory and time.
    digest.update(repr([part.span for part in inventory.parts if part.span]).encode("utf-8", "backslashreplace"))
    inventory.fingerprint = digest.hexdigest()
    is_here = fingerprint_in(workplace / _PLAN) == inventory.fingerprint
    if not is_here:
        clear(workplace, _INVENTORY, DISCOVERED)
        write_json(workplace / _PLAN, {"fingerprint": inventory.fingerprint})
    return inventory, is_here


def _longest_part(listed: list[tuple[InputPart, bool]]) -> float:
    """The most seconds of a part of several inputs."""
    return min(max(sum(each.seconds for each, _ in listed) / _MOST_PARTS, _SHORTEST_PART), _LONGEST_PART)


def _cut(listed: list[tuple[InputPart, bool]], listing: Path, cut: Cut) -> Iterator[tuple[InputPart, bool]]:
    """Yields the parts of one input each, and instead of a large file its spans, each alone."""
    most = _longest_part(listed)
    with listing.open("rb") as file:
        for part, alone in listed:
            spans: Sequence[Span] = ()
            if part.seconds >= _LEAST_SPANS * most:
                file.seek(part.offset)
                spans = cut(_entry(file.readline()), int(part.size * most / part.seconds))
            for span in spans:
                seconds = part.seconds * span.size / max(1, part.size)
                yield InputPart(part.offset, 1, span.size, seconds, span), True
            if not spans:
                yield part, alone


def _joined(listed: list[tuple[InputPart, bool]], most: float) -> list[InputPart]:
    """Joins parts of one input each into the parts of the build; inputs marked as alone get their own."""
    parts: list[InputPart] = []
    is_alone = False
    for each, alone in listed:
        last = parts[-1] if parts else None
        if last is None or alone or is_alone or last.seconds + each.seconds > most or last.entries == _MOST_FILES:
            parts.append(last := InputPart(each.offset, span=each.span))
        is_alone = alone
        last.entries += 1
        last.size += each.size
        last.seconds += each.seconds
    return parts


def fingerprint_in(path: Path) -> str | None:
    """The fingerprint of the inputs in a JSON file, or None if it has none."""
    try:
        return str(read_json(path, DataError)["fingerprint"])
    except (DataError, KeyError, TypeError):
        return None


def announce(inventory: Inventory, console: Console) -> None:
    """Prints what will be read and the disk space that it takes; warns if the disk has too little.

    How long it takes is not known before some of it is done: it depends on the machine and on what the files contain.
    """
    room, free = int(inventory.num_bytes * _ROOM), shutil.disk_usage(inventory.directory).free
    if inventory.num_bytes >= _SHOWN_FROM_BYTES:
        files = counted(inventory.files - inventory.skipped.total(), "file")
        console.info(
            f"{data_size(inventory.num_bytes)} in {files}, read in {counted(len(inventory.parts), 'part')}: about "
            f"{data_size(room)} of room, most of it until the build is done ({data_size(free)} is free)."
        )
    if room > free:
        console.warn(
            f"{inventory.directory.parent} has {data_size(free)} free, and the build may need {data_size(room)}. If it "
            "fills up, free some space and run the same command again: it continues from what is done."
        )


class StageTimes:
    """The seconds of every stage over all runs of a build, saved every second in the workplace."""

    def __init__(self, workplace: Path) -> None:
        self._path = workplace / _SECONDS
        self.seconds: dict[str, float] = read_json(self._path, DataError) if self._path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the stage."""
        before, started, ended = self.seconds.get(name, 0.0), time.monotonic(), threading.Event()

        def note() -> None:
            self.seconds[name] = round(before + time.monotonic() - started, 3)
            write_json(self._path, self.seconds)

        def watch() -> None:
            while not ended.wait(_EACH_SECONDS):
                with suppress(StorageError):  # the work itself reports a full disk
                    note()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            note()
