"""Who ranks wait for: the arithmetic by hand, and ranks of which one sleeps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from sheepop.train.profiler import OwnTime, Suspicion, latest

from .conftest import Together, rows


@pytest.mark.parametrize(
    ("own", "group", "expected"),
    [
        ([1.0, 1.5], 2, (1, 0.5)),
        ([1.0, 2.1, 1.2, 1.4], 4, (1, 0.9)),  # the median of 1.0, 1.2 and 1.4 is 1.2
        ([1.0, 1.1, 3.0, 3.0], 2, (1, 0.1)),  # stages of a pipeline have other work
        ([1.0, 9.0], 1, (0, 0.0)),
    ],
)
def test_a_rank_is_compared_with_the_median_of_those_that_do_the_same(
    own: list[float], group: int, expected: tuple[int, float]
) -> None:
    rank, waited = latest(own, group)
    assert (rank, waited) == (expected[0], pytest.approx(expected[1]))


def test_a_late_rank_is_told_once_and_again_where_it_changes() -> None:
    suspicion = Suspicion()
    heard = [(2, 0.5), (2, 0.5), (2, 0.5), (2, 0.5), (2, 0.9), (2, 1.0), (2, 1.9), (1, 0.3), (1, 0.3), (1, 0.3)]
    told = [suspicion.confirmed(rank, waited, 1.0) for rank, waited in heard]
    # Told of 0.5 s, again of twice that, and of another rank when that is late for the third time.
    assert told == [False, False, True, False, False, True, False, False, False, True]
    suspicion = Suspicion()
    assert not any(suspicion.confirmed(number % 2, 0.5, 1.0) for number in range(20))  # now this one, now that one
    assert not any(suspicion.confirmed(0, 0.2, 1.0) for _ in range(20))  # not clearly


def test_time_in_exchanges_is_no_work_of_its_own() -> None:
    times = iter([10.0, 14.0, 20.0, 22.0, 24.0])
    own = OwnTime([test_a_late_rank_is_told_once_and_again_where_it_changes.__code__], times.__next__)
    for number in range(2):  # from 10 to 14, and from 20 to 22
        with own.step(number):
            own.look(sys._getframe())
    in_exchange = next(iter(_frames_of("torch.distributed")))
    for frame in (in_exchange, in_exchange, None):
        own.look(frame)
    assert own.seen() == (3.0, 0.6, 5)
    own.restart()
    assert own.seen() == (0.0, 0.0, 0)


def test_no_second_is_counted_twice_where_a_measurement_ends_within_a_step() -> None:
    times = iter([10.0, 13.0, 13.0, 14.0, 20.0, 24.0, 25.0, 25.0, 26.0])
    own = OwnTime((), times.__next__)
    with own.step(0):
        assert own.seen() == (3.0, 0.0, 0)
        own.restart()
    with own.step(1):
        assert own.seen() == (5.0, 0.0, 0)  # from 13 to 14, and from 20 to 24
        own.restart()
        assert own.seen() == (0.0, 0.0, 0)


def _frames_of(module: str) -> list[object]:
    """Frames of calls that run code of a module."""
    found: list[object] = []
    code = compile("seen.append(sys._getframe())", "x", "exec")
    exec(code, {"__name__": f"{module}.distributed_c10d", "sys": sys, "seen": found})
    assert dist.__name__ == module
    return found


# Ranks whose time is counted in samples, so that it does not matter how long a machine takes for anything. In each
# backward pass a rank takes `own` samples of its own work, then `waiting` ones of an exchange in which it waits for the
# other rank, whose `waiting` is negative and which goes on when they are taken. A sample stands for 0.02 seconds.
COUNTED = """
import sys, time
from pathlib import Path
from sheepop.train import placement, profiler
own, waiting, place = int(sys.argv.pop(1)), int(sys.argv.pop(1)), Path(sys.argv.pop(1))
wanted, taken, calls, back = [], 0, 0, placement.Loss.back
class Counted(profiler.OwnTime):
    def __init__(self, waits):
        super().__init__(waits, lambda: 0.02 * taken)
    def look(self, frame):
        global taken
        if not wanted:
            return
        before = self._looks, self._own
        super().look(frame)
        if self._own - before[1] != wanted[0]:
            self._looks, self._own = before
            return
        taken += 1
        if not wanted.pop() and not wanted:
            (place / str(calls)).touch()
def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
def counted_back(loss):
    global calls
    calls += 1
    wanted.extend([1] * own)
    wait_for(lambda: not wanted)
    wanted.extend([0] * waiting)
    if waiting < 0:
        wait_for((place / str(calls)).exists)
    return back(loss)
profiler.OwnTime, profiler._LOOK_SECONDS, placement.Loss.back = Counted, 0.001, counted_back
from sheepop.__main__ import main
main()
"""


def test_ranks_that_wait_for_one_name_it_and_ranks_that_are_alike_name_none(together: Together, tmp_path: Path) -> None:
    more = ["training.max_steps=14", "training.eval_interval=14", "parallel.zero=3"]
    warning = r"Rank 1, on .*, arrives 0\.28 s after the others at every step \(0\.3 s\), so all wait for it"
    # Four steps of 15 samples are enough for a measurement.
    for name, own, measured in (("alike", (15, 15), (0, 0.0)), ("late", (1, 15), (1, pytest.approx(0.28)))):
        (tmp_path / name).mkdir()
        options = together.options(tmp_path / f"{name} run", *more)
        each = {f"rank_{rank}": [own[rank], own[1 - rank] - own[rank], tmp_path / name, *options] for rank in range(2)}
        ends = together.run(2, options, program_0=COUNTED, program_1=COUNTED, **each)
        assert [end.code for end in ends] == [0, 0], ends
        assert [end.err.count("so all wait for it") for end in ends] == [int(name == "late"), 0], ends
        assert name == "alike" or re.search(warning, ends[0].err)
        told = [row for row in rows(tmp_path / f"{name} run") if "slowest_rank" in row]
        assert [(row["split"], row["step"]) for row in told] == [("train", 4), ("train", 8), ("train", 12)]
        assert [(row["slowest_rank"], row["seconds_waited_for"]) for row in told] == [measured] * 3
