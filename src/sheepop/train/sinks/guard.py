"""Runs each sink in a thread with a bounded queue, so that none can stop a run or slow it down.

The loop only puts rows into a queue in memory. The sink's own thread opens the sink, writes and closes it. If that
raises an error, the thread tries the row again and finally gives up the sink. If it hangs, rows that do not fit into
the queue are counted as lost, and the end of the run waits only for a bounded time. ``metrics.jsonl`` always has every
row.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from sheepop.core.facts import counted

CAPACITY = 1_000
CLOSE_SECONDS = 10.0
RETRY_SECONDS = (0.5, 2.0)  # pauses before further tries of a row; after the last try the sink is given up


class Sink(Protocol):
    """A destination for the rows of metrics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row."""

    def close(self) -> None:
        """Ends the writing."""


class GuardedSink:
    """One sink in a thread of its own; `write` never waits and never raises. `title` names it in warnings."""

    def __init__(
        self,
        title: str,
        open_sink: Callable[[], Sink],
        warn: Callable[[str], None],
        *,
        capacity: int = CAPACITY,
        retry_seconds: Sequence[float] = RETRY_SECONDS,
    ) -> None:
        self.title = title
        self.lost = 0  # rows that are not in the sink
        self._open_sink, self._warn = open_sink, warn
        self._capacity, self._retry_seconds = capacity, retry_seconds
        self._rows: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._sink: Sink | None = None
        self._closing, self._given_up = False, False
        self._error: str | None = None
        self._said_error, self._said_full = False, False
        # A daemon: a thread that hangs does not keep the program from ending.
        self._thread = threading.Thread(target=self._work, name=f"sink {title}", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands one row to the thread, or counts it as lost if the sink is given up or its queue is full."""
        with self._changed:
            full = len(self._rows) >= self._capacity
            if self._given_up or full:
                self.lost += 1
            else:
                self._rows.append(dict(row))
                self._changed.notify()
        if full and not self._said_full:
            self._said_full = True
            self._warn(f"{self.title} cannot keep up; the rows that it cannot take will be missing there.")
        self._say_error()

    def ask_to_close(self) -> None:
        """Tells the thread to end after the queued rows."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for the thread to end, and warns about rows that the sink lacks."""
        self._thread.join(max(0.0, seconds))
        self._say_error()
        with self._changed:
            missing = self.lost + len(self._rows)
        if self._thread.is_alive():
            self._warn(f"{self.title} did not finish in time and was given up; the last rows may be missing there.")
        if missing:
            self._warn(f"{self.title} is missing {counted(missing, 'row')} of this run; metrics.jsonl has all of them.")

    def _say_error(self) -> None:
        """Warns about the first error, in the thread of the loop."""
        if self._error is not None and not self._said_error:
            self._said_error = True
            self._warn(f"{self.title} failed; the run continues without it: {self._error}")

    def _work(self) -> None:
        if self._succeeds(self._open):
            while (row := self._next_row()) is not None:
                if not self._write_with_retries(row):
                    break
        with self._changed:
            self._given_up = True
            self.lost += len(self._rows)
            self._rows.clear()
        if self._sink is not None:
            self._succeeds(self._sink.close)

    def _open(self) -> None:
        self._sink = self._open_sink()

    def _next_row(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closing)
            return self._rows.popleft() if self._rows else None

    def _write_with_retries(self, row: dict[str, Any]) -> bool:
        """Writes the row with further tries; returns whether one succeeded. The end of the run cuts pauses short."""
        assert self._sink is not None
        for pause in (*self._retry_seconds, None):
            if self._succeeds(partial(self._sink.write, row)):
                return True
            if pause is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
        with self._changed:
            self.lost += 1
        return False

    def _succeeds(self, action: Callable[[], None]) -> bool:
        """Runs the action; returns whether it raised no error. The first error is kept for a warning.

        Catches everything, even an exit, because a library must not end the run.
        """
        try:
            action()
        except BaseException as error:
            if self._error is None:
                self._error = f"{type(error).__name__}: {error}"
            return False
        return True


class Sinks:
    """All sinks of a run as one; the end of the block closes them in parallel, within one time limit."""

    def __init__(self, sinks: Sequence[GuardedSink], *, close_seconds: float = CLOSE_SECONDS) -> None:
        self._sinks = sinks
        self._close_seconds = close_seconds

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands the row to every sink."""
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Waits for every thread to end, until the time limit."""
        deadline = time.monotonic() + self._close_seconds
        for sink in self._sinks:
            sink.ask_to_close()
        for sink in self._sinks:
            sink.wait(deadline - time.monotonic())

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
