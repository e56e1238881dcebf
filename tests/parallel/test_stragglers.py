"""Who ranks wait for: the arithmetic by hand, and ranks of which one sleeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from sheepop.train.profiler import OwnTime, Suspicion, latest

from ..faults.conftest import DISTURBED
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


def _frames_of(module: str) -> list[object]:
    """Frames of calls that run code of a module."""
    found: list[object] = []
    code = compile("seen.append(sys._getframe())", "x", "exec")
    exec(code, {"__name__": f"{module}.distributed_c10d", "sys": sys, "seen": found})
    assert dist.__name__ == module
    return found


def test_ranks_that_wait_for_one_name_it_and_ranks_that_are_alike_name_none(together: Together, tmp_path: Path) -> None:
    sleep = "time.sleep({}); globals().update(calls=0)"
    place = ("sheepop.train.placement", "Loss.back", "1")
    more = ["training.max_steps=14", "training.eval_interval=14", "parallel.zero=3"]
    for name, seconds in (("alike", (0.2, 0.2)), ("late", (0.02, 0.3))):
        options = together.options(tmp_path / name, *more)
        each = {f"rank_{rank}": [sleep.format(seconds[rank]), *place, *options] for rank in range(2)}
        ends = together.run(2, options, program_0=DISTURBED, program_1=DISTURBED, **each)
        assert [end.code for end in ends] == [0, 0], ends
        assert sum(end.err.count("so all wait for it") for end in ends) == (name == "late"), ends
        if name == "late":
            assert "Rank 1, on " in ends[0].err
    told = [row for row in rows(tmp_path / "late") if "slowest_rank" in row]
    assert len(told) >= 3 and all(row["split"] == "train" and row["slowest_rank"] == 1 for row in told)
    assert all(row["seconds_waited_for"] > 0.15 for row in told)
