"""Sinks that throw or hang, behind the guard: the loop is never stopped, never waits, and is told what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from sheepop.train.sinks import GuardedSink, Sinks


@dataclass
class FakeSink:
    """Keeps what it hears, and does something else before it keeps or closes."""

    before_write: Callable[[int], None] = lambda step: None
    before_close: Callable[[], None] = lambda: None
    steps: list[int] = field(default_factory=list)
    closed: bool = False

    def write(self, row: Mapping[str, Any]) -> None:
        self.before_write(row["step"])
        self.steps.append(row["step"])

    def close(self) -> None:
        self.before_close()
        self.closed = True


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a sink that hangs waits for; opened at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def raising(error: BaseException, *, times: int) -> Callable[[int], None]:
    left = iter(range(times))

    def act(step: int) -> None:
        if next(left, None) is not None:
            raise error

    return act


def guard(sink: FakeSink, warnings: list[str], **options: Any) -> GuardedSink:
    return GuardedSink("The sink", lambda: sink, warnings.append, **{"retry_seconds": (0.0, 0.0), **options})


def write(sinks: Sinks | GuardedSink, steps: range) -> None:
    for step in steps:
        sinks.write({"step": step, "split": "train", "loss": 1.0})


def test_every_row_arrives_in_order_before_the_sink_is_closed() -> None:
    warnings: list[str] = []
    sink = FakeSink()
    with Sinks([guard(sink, warnings)]) as sinks:
        write(sinks, range(200))
    assert (sink.steps, sink.closed, warnings) == (list(range(200)), True, [])


def test_a_sink_hears_the_row_as_it_was_when_it_was_written(gate: threading.Event) -> None:
    heard: list[dict[str, Any]] = []

    class Keeping(FakeSink):
        def write(self, row: Mapping[str, Any]) -> None:
            gate.wait()
            heard.append(dict(row))

    with Sinks([guard(Keeping(), [])]) as sinks:
        row = {"step": 1, "split": "train", "loss": 2.0}
        sinks.write(row)
        row["loss"] = 3.0
        gate.set()
    assert heard == [{"step": 1, "split": "train", "loss": 2.0}]


@pytest.mark.parametrize("error", [RuntimeError("no route"), SystemExit(1), KeyboardInterrupt("no route")])
def test_a_row_that_fails_is_tried_again_and_the_error_is_said_once(error: BaseException) -> None:
    warnings: list[str] = []
    sink = FakeSink(before_write=raising(error, times=2))
    with Sinks([guard(sink, warnings)]) as sinks:
        write(sinks, range(5))
    assert (sink.steps, sink.closed) == ([0, 1, 2, 3, 4], True)
    assert warnings == [f"The sink failed; the run continues without it: {type(error).__name__}: {error}"]


def test_a_sink_that_keeps_failing_is_given_up_and_its_missing_rows_are_counted() -> None:
    warnings: list[str] = []
    sink = FakeSink(before_write=raising(OSError("gone"), times=1000))
    guarded = guard(sink, warnings)
    write(guarded, range(3))
    guarded._thread.join(30)
    write(guarded, range(3, 10))
    Sinks([guarded]).close()
    assert (sink.steps, sink.closed, guarded.lost) == ([], True, 10)
    assert warnings == [
        "The sink failed; the run continues without it: OSError: gone",
        "The sink is missing 10 rows of this run; metrics.jsonl has all of them.",
    ]


def test_a_sink_that_cannot_be_opened_is_given_up() -> None:
    warnings: list[str] = []

    def fail() -> FakeSink:
        raise ConnectionError("no key")

    with Sinks([GuardedSink("The sink", fail, warnings.append)]) as sinks:
        write(sinks, range(4))
    assert warnings == [
        "The sink failed; the run continues without it: ConnectionError: no key",
        "The sink is missing 4 rows of this run; metrics.jsonl has all of them.",
    ]


def test_a_write_that_hangs_holds_up_nothing_and_what_is_left_out_is_counted(gate: threading.Event) -> None:
    warnings: list[str] = []
    entered = threading.Event()

    def hang(step: int) -> None:
        entered.set()
        gate.wait()

    sink = FakeSink(before_write=hang)
    guarded = guard(sink, warnings, capacity=10)
    write(guarded, range(1))
    assert entered.wait(30)
    write(guarded, range(1, 31))  # ten wait in the queue, the other twenty are lost
    assert guarded.lost == 20
    Sinks([guarded], close_seconds=0.05).close()
    assert warnings == [
        "The sink cannot keep up; the rows that it cannot take will be missing there.",
        "The sink did not finish in time and was given up; the last rows may be missing there.",
        "The sink is missing 30 rows of this run; metrics.jsonl has all of them.",
    ]


@pytest.mark.parametrize("where", ["open", "close"])
def test_an_end_that_hangs_is_waited_for_a_bounded_time(gate: threading.Event, where: str) -> None:
    warnings: list[str] = []
    sink = FakeSink(before_close=(lambda: None) if where == "open" else lambda: gate.wait() and None)
    opening = (lambda: gate.wait() and sink) if where == "open" else lambda: sink
    with Sinks([GuardedSink("The sink", opening, warnings.append)], close_seconds=0.2) as sinks:
        write(sinks, range(3))
    left_behind = "The sink did not finish in time and was given up; the last rows may be missing there."
    lacking = "The sink is missing 3 rows of this run; metrics.jsonl has all of them."
    assert warnings == ([left_behind, lacking] if where == "open" else [left_behind])


def test_sinks_that_hang_share_one_bounded_time_and_spare_the_others(gate: threading.Event) -> None:
    warnings: list[str] = []
    good = FakeSink()
    hanging = [FakeSink(before_close=lambda: gate.wait() and None) for _ in range(3)]
    sinks = Sinks([guard(sink, warnings) for sink in (*hanging, good)], close_seconds=1.0)
    write(sinks, range(5))
    sinks.close()
    assert (good.steps, good.closed) == ([0, 1, 2, 3, 4], True)
    assert len(warnings) == 3


def test_an_error_within_the_block_passes_and_the_sink_is_closed() -> None:
    sink = FakeSink()
    with pytest.raises(ZeroDivisionError), Sinks([guard(sink, [])]) as sinks:
        write(sinks, range(2))
        raise ZeroDivisionError
    assert (sink.steps, sink.closed) == ([0, 1], True)
