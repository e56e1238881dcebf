"""Preparing ahead: the right thing for every step, errors at their step, and a thread that always ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.train.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_step_gets_what_was_prepared_for_it(ahead: int) -> None:
    with Prefetch(lambda step: step * step, ahead) as prefetch:
        assert [prefetch.take(step) for step in range(5, 25)] == [step * step for step in range(5, 25)]
    assert threads() == []


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3))
def test_steps_may_be_asked_for_in_any_order(steps: list[int], ahead: int) -> None:
    with Prefetch(lambda step: -step, ahead) as prefetch:
        assert [prefetch.take(step) for step in steps] == [-step for step in steps]


def test_no_more_is_prepared_than_asked_for_and_it_is_done_elsewhere() -> None:
    prepared: list[tuple[int, str]] = []
    reached = threading.Event()

    def prepare(step: int) -> int:
        prepared.append((step, threading.current_thread().name))
        if step == 3:
            reached.set()
        return step

    with Prefetch(prepare, 3) as prefetch:
        assert prefetch.take(0) == 0
        assert reached.wait(10)
        assert not threading.Event().wait(0.05)
        assert prepared == [(step, "prefetch") for step in range(4)]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_comes_out_of_its_own_step_as_it_is(ahead: int) -> None:
    error = DataError("gone")

    def prepare(step: int) -> int:
        if step == 3:
            raise error
        return step

    with Prefetch(prepare, ahead) as prefetch:
        assert [prefetch.take(step) for step in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                prefetch.take(3)
            assert caught.value is error
        assert prefetch.take(4) == 4
    assert threads() == []


@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError, None])
def test_whatever_ends_the_block_ends_the_thread(how: type[BaseException] | None) -> None:
    try:
        with Prefetch(lambda step: step, 2) as prefetch:
            prefetch.take(0)
            assert len(threads()) == 1
            if how is not None:
                raise how
    except (KeyboardInterrupt, RuntimeError):
        pass
    assert threads() == []


def waiting(ready: threading.Event) -> Callable[[int], int]:
    def prepare(step: int) -> int:
        ready.wait(30)
        return step

    return prepare


def test_a_signal_is_handled_while_data_is_waited_for() -> None:
    ready = threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: ready.set())
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with Prefetch(waiting(ready), 2) as prefetch:
            timer.start()
            assert prefetch.take(0) == 0
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


def test_a_negative_number_of_steps_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Prefetch(lambda step: step, -1)
