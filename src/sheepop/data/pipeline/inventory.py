"""What a build is made of: files, git repositories at a revision, the rows of a query.

Every input is one line of a file, cut into parts that depend on nothing but the input and take about as long each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, Literal

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, write_json

INVENTORY, PLAN = "inventory.jsonl", "plan.json"
EntryType = Literal["file", "git", "query"]
_MOST_PARTS = 256
# Seconds of work: what a kill may cost, and what a task is worth starting for.
_SHORTEST_PART, _LONGEST_PART = 0.8, 100.0
_MOST_FILES = 2000
# Megabytes of file that one process gets through in a second, from reading to tokens (bench/data_speed.py).
_SPEEDS = {
    **dict.fromkeys((".pdf",), 1.0),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".warc", ".epub"), 0.8),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".heic", ".avif"), 0.05),
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".xlsb", ".xls", ".odt", ".odp", ".ods", ".doc", ".ppt"), 0.5),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz", ".parquet"), 0.8),
}
_TEXT_SPEED = 2.5


class Query:
    """A database address and what is asked of it; its text never shows the password."""

    def __init__(self, url: str, text: str) -> None:
        self.url, self.text = url, text

    def __repr__(self) -> str:
        return f"Query({self.text!r})"


@dataclass(frozen=True, slots=True)
class Entry:
    """One input: a file at `path`; a blob `revision` of the git repository at `path`; or the rows of the query.

    `source` is its printable name, `size` its length in bytes (0 for a query), `modified_ns` its age. `facts` are
    handed on to its documents.
    """

    type: EntryType
    path: str
    source: str
    size: int
    modified_ns: int = 0
    revision: str = ""
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def seconds(self) -> float:
        """About how long one process works on it."""
        return self.size / 1e6 / _SPEEDS.get(PurePath(self.source).suffix.lower(), _TEXT_SPEED)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines of the inventory: where they begin in the file and how many, their bytes and seconds."""

    offset: int
    entries: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The inventory of a build in `directory`, cut into parts; `fingerprint` stands for input and settings."""

    directory: Path
    fingerprint: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of all inputs."""
        return sum(part.size for part in self.parts)

    @property
    def seconds(self) -> float:
        """About how long one process works on all of them."""
        return sum(part.seconds for part in self.parts)

    def entries(self, number: int) -> Iterator[Entry]:
        """The inputs of a part, in order."""
        part = self.parts[number]
        with (self.directory / INVENTORY).open("rb") as file:
            file.seek(part.offset)
            for _ in range(part.entries):
                record = json.loads(file.readline())
                yield Entry(**{**record, "facts": tuple((k, v) for k, v in record["facts"])})


def write_plan(directory: Path, entries: Iterable[Entry], settings: Any) -> Plan:
    """Writes the inventory and cuts it into parts of about the total work over 256, within 0.8 and 100 seconds.

    `settings` (JSON) is everything else that decides the result; it goes into the fingerprint.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8"))
    lines: list[tuple[int, int, float, bool]] = []
    offset = 0
    with (directory / INVENTORY).open("wb") as file:
        for entry in entries:
            # Names may hold bytes that are not UTF-8; as escapes they go through JSON unharmed.
            line = json.dumps(asdict(entry)).encode("ascii") + b"\n"
            digest.update(line)
            file.write(line)
            lines.append((offset, entry.size, entry.seconds, entry.type == "query"))
            offset += len(line)
    plan = Plan(directory, digest.hexdigest(), tuple(_cut(lines)))
    write_json(
        directory / PLAN,
        {"fingerprint": plan.fingerprint, "parts": [list(astuple(part)) for part in plan.parts]},
    )
    return plan


@lru_cache(maxsize=2)
def read_plan(directory: Path) -> Plan:
    """The plan that `write_plan` left in `directory`; raises `DataError` when it is damaged."""
    record = read_json(directory / PLAN, DataError)
    try:
        return Plan(directory, record["fingerprint"], tuple(Part(*part) for part in record["parts"]))
    except (KeyError, TypeError):
        raise DataError(f"{directory / PLAN} is damaged. Remove {directory} and run the command again.") from None


def _cut(lines: list[tuple[int, int, float, bool]]) -> Iterator[Part]:
    most = min(max(sum(seconds for _, _, seconds, _ in lines) / _MOST_PARTS, _SHORTEST_PART), _LONGEST_PART)
    begin, count, total, work = 0, 0, 0, 0.0
    for offset, size, seconds, alone in lines:
        if count and (alone or work + seconds > most or count == _MOST_FILES):
            yield Part(begin, count, total, work)
            begin, count, total, work = offset, 0, 0, 0.0
        count += 1
        total += size
        work += seconds
    if count:
        yield Part(begin, count, total, work)
