"""What a look at a run before it starts finds: faults that would end it, things to know, and room on the disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sheepop.core.errors import SheepOpError

T = TypeVar("T")
_MILESTONES = 3
_BEST_AND_NEW = 2  # the best checkpoint, and one that is being written while all others are still there


@dataclass(frozen=True)
class Finding:
    """What a check found: what is wrong, where, and what to do, in `words`; `ends` if it would end the run."""

    check: str
    words: str
    ends: bool = True


@dataclass
class Findings:
    """The findings of all checks, in the order of the checks."""

    found: list[Finding] = field(default_factory=list)

    def attempt(self, check: str, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`; an error that a run would end with becomes a finding, and None is returned."""
        try:
            return work()
        except SheepOpError as error:
            self.add(check, str(error))
            return None

    def passes(self, check: str, work: Callable[[], None]) -> bool:
        """Like `attempt`, for work without a result; returns whether it raised no such error."""
        return self.attempt(check, lambda: (work(), True)) is not None  # type: ignore[func-returns-value]

    def add(self, check: str, words: str, *, ends: bool = True) -> None:
        """Adds a finding, unless another check found the same."""
        if all(finding.words != words for finding in self.found):
            self.found.append(Finding(check, words, ends))

    @property
    def end_the_run(self) -> bool:
        """Whether one of the findings would end the run."""
        return any(finding.ends for finding in self.found)


@dataclass(frozen=True)
class Disk:
    """Bytes on the disk of a run: `free` now, `data` of the run, and `checkpoints` of `checkpoint` bytes at a time."""

    free: int
    data: float
    checkpoint: float
    checkpoints: int

    @property
    def needed(self) -> float:
        """The most bytes that the run takes at a time."""
        return self.data + self.checkpoints * self.checkpoint

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.needed <= self.free


def existing_parent(path: Path) -> Path:
    """The directory that exists nearest to `path`, itself or above it."""
    found = path.absolute()
    while not found.is_dir() and found != found.parent:
        found = found.parent
    return found


def free_bytes(path: Path) -> int:
    """The free bytes of the disk on which `path` would be written."""
    return shutil.disk_usage(existing_parent(path)).free


def most_checkpoints(steps: int, interval: int, keep: int, *, milestones: bool) -> int:
    """The most checkpoints of a run that exist at a time: the newest, the best, the milestones, one in work."""
    extra = _MILESTONES if milestones else 0
    written = math.ceil(steps / interval) + extra
    return min(written, keep + extra + _BEST_AND_NEW)
