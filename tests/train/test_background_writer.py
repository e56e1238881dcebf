"""What is written beside the loop is written in order, and what goes wrong there is heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from sheepop.train.checkpointer import BackgroundWriter


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter()
    yield writer
    writer.close()


def failing(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(f"job {number}")

    return fail


def test_a_job_starts_when_the_one_before_has_ended_and_not_before(writer: BackgroundWriter) -> None:
    may_end, written = threading.Event(), []

    def first() -> None:
        may_end.wait(60)
        written.append("first")

    writer.submit(first)
    threading.Timer(0.02, may_end.set).start()
    writer.submit(lambda: written.append("second"))
    assert written[0] == "first"
    writer.wait()
    assert written == ["first", "second"]


def test_what_a_job_raises_is_raised_once_by_the_next_call(writer: BackgroundWriter) -> None:
    writer.submit(failing(1))
    with pytest.raises(OSError, match="job 1"):
        writer.wait()
    writer.wait()
    writer.submit(failing(2))
    with pytest.raises(OSError, match="job 2"):
        writer.submit(lambda: pytest.fail("a job was begun after one that failed"))
    writer.check()


def test_the_loop_hears_of_a_failure_without_waiting_for_a_job_that_goes_on(writer: BackgroundWriter) -> None:
    may_end = threading.Event()

    def fail() -> None:
        may_end.wait(60)
        raise OSError("no space")

    writer.submit(fail)
    writer.check()  # it goes on, and nothing is known yet
    may_end.set()
    writer._thread.shutdown()
    with pytest.raises(OSError, match="no space"):
        writer.check()


def test_at_the_end_what_was_begun_is_written(writer: BackgroundWriter) -> None:
    may_end, written = threading.Event(), []

    def write() -> None:
        may_end.wait(60)
        written.append("all of it")

    writer.submit(write)
    threading.Timer(0.02, may_end.set).start()
    writer.close()
    assert written == ["all of it"]
