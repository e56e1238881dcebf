"""What a build is made of: every input on one line of a file, cut into parts that depend on nothing but the input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, write_json

INVENTORY, PLAN = "inventory.jsonl", "plan.json"
EntryType = Literal["file", "git", "query"]
_MOST_PARTS = 256
_SMALLEST_PART, _LARGEST_PART = 2**21, 2**28
_MOST_FILES = 2000


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


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines of the inventory: where they begin in the file, how many, and the bytes they stand for."""

    offset: int
    entries: int
    size: int


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

    def entries(self, number: int) -> Iterator[Entry]:
        """The inputs of a part, in order."""
        part = self.parts[number]
        with (self.directory / INVENTORY).open("rb") as file:
            file.seek(part.offset)
            for _ in range(part.entries):
                record = json.loads(file.readline())
                yield Entry(**{**record, "facts": tuple((k, v) for k, v in record["facts"])})


def write_plan(directory: Path, entries: Iterable[Entry], settings: Any) -> Plan:
    """Writes the inventory and cuts it into parts of about the total over 256, within 2 and 256 MiB.

    `settings` (JSON) is everything else that decides the result; it goes into the fingerprint.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8"))
    lines: list[tuple[int, int, int]] = []
    offset = 0
    with (directory / INVENTORY).open("wb") as file:
        for entry in entries:
            # Names may hold bytes that are not UTF-8; as escapes they go through JSON unharmed.
            line = json.dumps(asdict(entry)).encode("ascii") + b"\n"
            digest.update(line)
            file.write(line)
            lines.append((offset, entry.size, entry.type == "query"))
            offset += len(line)
    plan = Plan(directory, digest.hexdigest(), tuple(_cut(lines)))
    write_json(
        directory / PLAN,
        {"fingerprint": plan.fingerprint, "parts": [[p.offset, p.entries, p.size] for p in plan.parts]},
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


def _cut(lines: list[tuple[int, int, int]]) -> Iterator[Part]:
    target = min(max(sum(size for _, size, _ in lines) // _MOST_PARTS, _SMALLEST_PART), _LARGEST_PART)
    begin, count, total = 0, 0, 0
    for offset, size, alone in lines:
        if count and (alone or total + size > target or count == _MOST_FILES):
            yield Part(begin, count, total)
            begin, count, total = offset, 0, 0
        count += 1
        total += size
    if count:
        yield Part(begin, count, total)
