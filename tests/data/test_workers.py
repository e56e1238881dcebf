from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sheepop.core.errors import DataError
from sheepop.data.workers import ordered_map

# Workers import what they run, and test modules cannot be imported there; functions of the standard library can.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_keep_the_order_of_the_tasks(num_workers: int) -> None:
    numbers = [20_000, *range(12)]  # the first takes longest
    assert list(ordered_map(math.factorial, numbers, num_workers=num_workers)) == [math.factorial(n) for n in numbers]


def test_tasks_are_drawn_only_as_they_are_needed() -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for value in range(1000):
            drawn.append(value)
            yield value

    results = ordered_map(math.factorial, tasks(), num_workers=1)
    assert next(results) == 1
    results.close()
    assert drawn == [0, 1, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_arrives_as_it_is(num_workers: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        list(ordered_map(math.factorial, [-1], num_workers=num_workers))


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(DataError, match="A worker process ended abruptly"):
        list(ordered_map(os._exit, [9], num_workers=1))


def test_an_interrupt_does_not_wait_for_work_that_is_going_on(tmp_path: Path) -> None:
    started, finished = tmp_path / "started", tmp_path / "finished"
    work = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(5); "
    work += f"pathlib.Path({str(finished)!r}).touch()"

    def tasks() -> Iterator[str]:
        yield work
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        list(ordered_map(exec, tasks(), num_workers=1))
    assert not set(multiprocessing.active_children()) - before
    assert not finished.exists()
