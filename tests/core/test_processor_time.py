"""The share of the processors that other programs left, on planted counters of the system."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sheepop.core.machine import throttled_seconds
from sheepop.core.processor_time import ProcessorTime, Readings, waits_by_thread

BEFORE = Readings(own=5.0, busy=100.0, idle=50.0, stolen=1.0, waited={"1": 2.0, "2": 1.0}, throttled=3.0)


def after(
    own: float, others: float, idle: float, *, stolen: float = 0.0, waited: float = 0.0, throttled: float = 0.0
) -> Readings:
    """The counters after these seconds more."""
    return Readings(
        BEFORE.own + own,
        BEFORE.busy + own + others,
        BEFORE.idle + idle,
        BEFORE.stolen + stolen,
        {"1": 2.0 + waited / 2, "3": waited / 2},  # one thread has ended, and another has begun
        BEFORE.throttled + throttled,
    )


def share(*readings: Readings) -> float:
    left = iter(readings)
    processor = ProcessorTime(lambda: next(left))
    for _ in range(len(readings) // 2):
        with processor.counted():
            pass
    return processor.take()


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        # Ten seconds of two processors.
        (after(own=13, others=0, idle=7, waited=3), 1.0),  # alone: its threads wait for each other
        (after(own=13, others=0.5, idle=6.5, waited=3), 13 / 13.5),  # and the little that the system does
        (after(own=10, others=10, idle=0, waited=10), 0.5),  # beside two busy programs
        (after(own=10, others=10, idle=0, waited=5), 10 / 15),  # of which its threads wait for one
        (after(own=10, others=0, idle=0, waited=10, throttled=10), 1.0),  # alone with a quota of one processor
        (after(own=5, others=15, idle=0, waited=15, throttled=10), 0.5),  # beside others with that quota
        (after(own=16, others=0, idle=0, stolen=4), 0.8),  # on a virtual machine that gets less than it wants
        (after(own=8, others=8, idle=0, stolen=4, waited=8), 8 / 18),  # half of what is stolen was this process's
        # Ten seconds of eight processors, of which it needs two.
        (after(own=20, others=50, idle=10, waited=0.1), 20 / 20.1),
        (after(own=0, others=50, idle=30), 1.0),
    ],
)
def test_other_programs_take_what_a_process_waits_for_and_they_compute(later: Readings, expected: float) -> None:
    assert share(BEFORE, later) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (after(own=13, others=0.5, idle=6.5), 1.0),
        (after(own=10, others=10, idle=0), 0.5),
        (after(own=20, others=50, idle=10), 20 / 60),
        (after(own=20, others=10, idle=50), 1.0),
    ],
)
def test_without_counters_of_threads_idle_processors_count(later: Readings, expected: float) -> None:
    assert share(replace(BEFORE, waited=None), replace(later, waited=None)) == pytest.approx(expected, rel=1e-12)


def test_the_share_is_that_of_all_blocks_since_the_last_time() -> None:
    left = iter([BEFORE, after(own=10, others=10, idle=0, waited=10), BEFORE, after(own=10, others=0, idle=10)])
    processor = ProcessorTime(lambda: next(left))
    for _ in range(2):
        with processor.counted():
            pass
    assert [processor.take(), processor.take()] == [20 / 30, 1.0]


def test_counters_of_threads_are_nanoseconds_in_the_second_place(tmp_path: Path) -> None:
    for thread, text in {"7": "2000000000 500000000 7\n", "8": "1 1500000000 9\n", "9": ""}.items():
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "schedstat").write_text(text)
    assert waits_by_thread(tmp_path) == {"7": 0.5, "8": 1.5}
    assert waits_by_thread(tmp_path / "another system") is None


def test_the_quotas_of_a_group_and_its_parents_count(tmp_path: Path) -> None:
    first, second = tmp_path / "sys/fs/cgroup/cpu", tmp_path / "sys/fs/cgroup"
    (first / "box").mkdir(parents=True)
    (second / "house" / "room").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/box\n0::/house/room\n")
    (first / "box" / "cpu.stat").write_text("nr_periods 16\nnr_throttled 15\nthrottled_time 648571743\n")
    (second / "house" / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 2000000\n")
    assert throttled_seconds(tmp_path) == pytest.approx(2.648571743)
    assert throttled_seconds(tmp_path / "nowhere") == 0.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_only_the_processors_of_this_process_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hundredths of a second: user, nice, system, idle, waiting, two kinds of interrupts, stolen, guests."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1})
    (tmp_path / "stat").write_text(
        "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 9 9 9 9 9 9 9 9 9 9\ncpu1 100 20 30 400 50 6 7 80 90 0\n"
    )
    found = Readings.now()
    assert (found.busy, found.idle, found.stolen) == pytest.approx((1.63, 4.5, 0.8))
    assert found.own > 0
