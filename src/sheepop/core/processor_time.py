"""The share of the processors that this process gets beside other programs, from the counters of the system."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from sheepop.core.machine import system_text, throttled_seconds

QUIET = 0.9  # a process that gets a larger share has the machine for itself
# Of these, busy is the sum; Linux counts the time of guests among that of users, too.
_BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class Readings:
    """Counters of processor time in seconds: their differences count.

    `own` is the time of this process, with its threads and the children that have ended. On the processors that it may
    use, `busy` is the time of all programs, `idle` of none, and `stolen` that of other virtual machines. `waited` is
    for how long each thread was ready and waited for a processor, None where the system does not tell; `throttled` is
    the part of that in which a quota of the control group was used up.
    """

    own: float
    busy: float
    idle: float
    stolen: float
    waited: Mapping[str, float] | None
    throttled: float

    @classmethod
    def now(cls) -> Self:
        """Reads the counters."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        processors = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            usable = os.sched_getaffinity(0)
            processors = [times for number, times in enumerate(processors) if number in usable] or processors
        return cls(
            own=time.process_time() + children.ru_utime + children.ru_stime,
            busy=sum(getattr(times, name, 0.0) for times in processors for name in _BUSY),
            idle=sum(times.idle + getattr(times, "iowait", 0.0) for times in processors),
            stolen=sum(getattr(times, "steal", 0.0) for times in processors),
            waited=waits_by_thread(),
            throttled=throttled_seconds(),
        )

    def lost_since(self, before: Readings) -> float:
        """The processor time that other programs took from this process since the readings `before`.

        That is at most the time for which its threads waited, since they do not need all processors all the time, and
        at most what others computed, since its threads also wait for each other.
        """
        own, idle = self.own - before.own, self.idle - before.idle
        others = max(0.0, self.busy - before.busy - own)
        if self.waited is None or before.waited is None:
            waited = others - idle  # a thread that waits takes an idle processor
        else:
            waited = sum(seconds - before.waited.get(thread, 0.0) for thread, seconds in self.waited.items())
            waited -= self.throttled - before.throttled
        stolen = (self.stolen - before.stolen) * own / (own + others) if own > 0 else 0.0
        return max(0.0, min(others, waited)) + stolen


def waits_by_thread(process: Path = Path("/proc/self")) -> dict[str, float] | None:
    """The seconds for which each thread of this process has waited for a processor; None if the system does not say."""
    found = {}
    for file in process.glob("task/*/schedstat"):  # nanoseconds on a processor, nanoseconds of waiting, turns
        fields = system_text(file).split()
        if len(fields) == 3:  # a thread may have ended meanwhile
            found[file.parent.name] = int(fields[1]) / 1e9
    return found or None


class ProcessorTime:
    """The share of its processor time that this process got, where the rest went to other programs.

    A process that is alone gets all of it, also while its threads wait for each other or it waits for a disk.
    """

    def __init__(self, read: Callable[[], Readings] = Readings.now) -> None:
        self._read = read
        self._own = self._lost = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Adds the time of the block, which should last for tenths of a second: the system counts in hundredths."""
        before = self._read()
        try:
            yield
        finally:
            after = self._read()
            self._own += after.own - before.own
            self._lost += after.lost_since(before)

    def take(self) -> float:
        """The share in the blocks since the last call, 1 without any."""
        whole = self._own + self._lost
        share = self._own / whole if whole > 0 else 1.0
        self._own = self._lost = 0.0
        return share
